"""Families of recipes: found by name, their sections found by walking their fields."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from freenergy import UserError, load_recipe
from freenergy.recipes.families import FAMILIES, family_class
from freenergy.recipes.load import RECIPES, make_recipe, recipes
from freenergy.recipes.sections import all_sections, kind_of, with_kinds
from freenergy.runs.run import Recipe


@dataclass(frozen=True)
class Leaf:
    kind: Literal["leaf"] = "leaf"


@dataclass(frozen=True)
class Twig:
    kind: Literal["twig"] = "twig"
    leaves: "tuple[Annotated[Leaf | Twig, 'any'], ...]" = ()


@dataclass(frozen=True)
class Tree:
    trunk: Leaf | Twig = field(default_factory=Leaf)
    crown: Annotated[Leaf | Twig, "any"] | None = None
    only: Leaf = field(default_factory=Leaf)
    names: dict[str, float] = field(default_factory=dict)


def test_sections_are_found_through_unions_tuples_and_annotations():
    assert set(all_sections(Tree)) == {Tree, Leaf, Twig}
    assert kind_of(Twig) == "twig"
    assert kind_of(Tree) is None


def test_the_kind_of_a_default_is_filled_in_and_others_are_asked_for():
    table = {"trunk": {}, "only": {}, "crown": {"kind": "twig", "leaves": [{"kind": "leaf"}]}, "names": {"a": 1.0}}
    assert with_kinds(table, Tree) == table | {"trunk": {"kind": "leaf"}}
    with pytest.raises(UserError, match=r"crown has no kind; choose one of 'leaf', 'twig'"):
        with_kinds({"crown": {}}, Tree)
    with pytest.raises(UserError, match=r"crown\.leaves\.0 has no kind"):
        with_kinds({"crown": {"kind": "twig", "leaves": [{}]}}, Tree)


def test_every_family_is_a_recipe():
    for name in FAMILIES:
        family = family_class(name)
        assert family.__dataclass_fields__["family"].default == name
        assert all(callable(getattr(family, method)) for method in ("stages", "to_json"))


def test_a_recipe_without_a_family_is_residual():
    for name in recipes():
        loaded = load_recipe(name)
        assert isinstance(loaded, Recipe)
        old = loaded.to_json()
        if (family := old.pop("family")) != "residual":
            assert f'family = "{family}"' in (RECIPES / f"{name}.toml").read_text()
            continue
        assert make_recipe(old) == loaded, "runs that were made before there were families are read"


def test_unknown_families_are_refused():
    with pytest.raises(UserError, match="mine: family is 'crf': choose one of residual"):
        make_recipe({"family": "crf"}, origin="mine")
    with pytest.raises(UserError, match="family is '3': choose one of"):
        make_recipe({"family": 3})
