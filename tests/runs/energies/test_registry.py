"""Adding an energy touches its module, one line of the registry and one row of the contracts."""

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import freenergy
from freenergy.core.errors import UserError
from freenergy.energies import registry
from freenergy.energies.module import EnergyModule
from freenergy.energies.registry import ENERGIES, settings_class

SRC = Path(freenergy.__file__).parent


def words(tree):
    """Names that code uses: identifiers, attributes, imports, and strings that are names or end in one."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Constant(value=str(text)):
                yield text.rpartition(":")[2]


FILES = {path: set(words(ast.parse(path.read_text(encoding="utf-8")))) for path in SRC.rglob("*.py")}


def modules_of(kind):
    """The classes of the module of an energy that are energies."""
    home = sys.modules[settings_class(kind).__module__]
    return [each.__name__ for each in vars(home).values() if isinstance(each, type) and each.__module__ == home.__name__
            and issubclass(each, EnergyModule)]  # fmt: skip


@pytest.mark.parametrize("kind", ENERGIES)
def test_an_energy_is_known_in_at_most_three_files(kind):
    names = [settings_class(kind).__name__, *modules_of(kind)]
    for name in names:
        found = sorted(str(path.relative_to(SRC)) for path, known in FILES.items() if name in known)
        assert 1 <= len(found) <= 3, (name, found)


def test_the_count_sees_a_fourth_file():
    known = sum("EnergySettings" in names for names in FILES.values())
    assert known > 3


@pytest.mark.parametrize("kind", ENERGIES)
def test_settings_answer_for_themselves(kind):
    settings = settings_class(kind)
    assert {field.name: field.default for field in fields(settings)}["kind"] == kind
    assert settings.fit in ("convex", "gradient", "none")
    assert settings.__doc__


def test_the_unions_are_all_that_is_registered():
    everything = {settings_class(kind) for kind in ENERGIES}
    assert set(get_args(registry.AnyEnergy)) == everything
    assert set(get_args(registry.PartEnergy)) == everything - {settings_class("product")}


def test_an_unknown_kind_is_one_sentence():
    with pytest.raises(UserError, match="there is no energy of kind 'no': choose one of unit, bit"):
        settings_class("no")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = registry.Nothing


def test_recipes_are_read_without_transformers():
    """It takes longer to import than all the rest of a run on counts."""
    code = "import sys, freenergy.recipes.load; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
