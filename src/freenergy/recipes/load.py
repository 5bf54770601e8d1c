"""A recipe: all settings of a run, from TOML (or Python) to frozen dataclasses.

This is the only place that reads what users write in recipes, and the only one that imports pydantic: unknown keys and
wrong types are refused here with their path, and everything below works on checked values.
"""

import json
import runpy
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from freenergy.core.checksums import without_digest
from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.workers.pool import InProcess, WorkerPool
from freenergy.recipes.experiment import Experiment
from freenergy.recipes.families import DEFAULT, family_class
from freenergy.recipes.sections import ErrorMessages, all_sections, with_kinds
from freenergy.runs.run import RECIPE, Recipe, Run
from freenergy.runs.sweep.rows import Sweep
from freenergy.training.settings import PRESETS

RECIPES = Path(__file__).parent
EXPERIMENTS = RECIPES / "experiments"
_LONGEST_PATH, _IN_PROCESS = 1000, InProcess()


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, one that comes with the package, or ``file.py:function`` that returns a Recipe.

    ``changes`` are ``a.b=c``, carried out before the recipe is checked.

    >>> load_recipe("demo", ["seed=3"]).seed
    3
    """
    table = _from_python(name) if is_code(name) else _from_toml(_path(name, RECIPES))
    for change in changes:
        _change(table, change)
    return make_recipe(table, origin=name)


def is_code(name: str) -> bool:
    """Whether a recipe's name is ``file.py:function``, so that loading it runs the file.

    >>> is_code("mine.py:recipe"), is_code("mine.py:x.toml"), is_code("mine.toml")
    (True, False, False)
    """
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def make_recipe(table: Mapping[str, Any], *, origin: str = "recipe") -> Recipe:
    """Check a table of settings; returns a recipe of the family that it names."""
    try:
        family = family_class(table.get("family", DEFAULT))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    found: Recipe = _checked(family, table, origin)
    return found


def load_run(folder: str | Path, workers: WorkerPool = _IN_PROCESS) -> Run[Any]:
    """Returns the run in a folder that ``freenergy run`` has made."""
    path = Path(folder) / RECIPE
    if not path.is_file():
        raise UserError(f"{folder} is not a run: give the folder that `freenergy run` made (it has a {RECIPE})")
    return Run(Path(folder), make_recipe(without_digest(read_json(path), path), origin=str(path)), workers)


def load_text_run(folder: str | Path, workers: WorkerPool = _IN_PROCESS) -> Run[Any]:
    """Returns the run in a folder, which must be one of a model of text."""
    found = load_run(folder, workers)
    if not hasattr(found.recipe, "corpus"):
        other = ", or use `freenergy tag`" if found.recipe.family == "tagging" else ""
        raise UserError(f"{folder} is a run of the family {found.recipe.family}: give one of a model of text{other}")
    return found


def load_experiment(name: str, changes: Sequence[str] = ()) -> Sweep:
    """The experiment in a TOML file, or one that comes with the package; ``changes`` as in ``load_recipe``.

    >>> load_experiment("earm-wikitext", ["seeds=[7]"]).seeds
    (7,)
    """
    table = _from_toml(_path(name, EXPERIMENTS))
    for change in changes:
        _change(table, change)
    return make_experiment(table, origin=name)


def make_experiment(table: Mapping[str, Any], *, origin: str = "experiment") -> Sweep:
    """Check a table of settings; returns the sweep that it describes."""
    settings: Experiment = _checked(Experiment, table, origin)
    named = settings.recipe
    recipe = _from_toml(_path(named, RECIPES)) if isinstance(named, str) else named
    try:
        return settings.sweep(recipe, lambda table, place: make_recipe(table, origin=place))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


def _checked(root: type, table: Mapping[str, Any], origin: str) -> Any:
    """Make a dataclass of a table; unknown keys and wrong types are refused with their path, in one sentence."""
    validate, messages = _checker(root)
    table = _with_presets(dict(table))
    try:
        table = with_kinds(table, root)
        # as JSON, since pydantic's strict mode wants instances of dataclasses from Python
        return validate(json.dumps(table, default=str))
    except ValidationError as error:
        raise UserError(messages.sentence(error.errors(), origin, table)) from None
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


@cache
def _checker(root: Hashable) -> tuple[Callable[[str], Any], ErrorMessages]:
    """Returns what validates and explains a dataclass, whose sections are made strict once."""
    assert isinstance(root, type)
    sections = all_sections(root)
    for section in sections:
        with_config(ConfigDict(extra="forbid", strict=True))(section)
    return TypeAdapter(root).validate_json, ErrorMessages(sections)


def _with_presets(table: dict[str, Any]) -> dict[str, Any]:
    """Fill in ``preset = NAME`` of optimisation sections; keys next to it win."""
    table = dict(table)
    for key, value in table.items():
        if isinstance(value, dict):
            table[key] = _with_presets(value)
        elif isinstance(value, list | tuple):
            table[key] = [_with_presets(each) if isinstance(each, dict) else each for each in value]
    for key in ("optimisation", "masked"):
        section = table.get(key)
        if isinstance(section, dict) and "preset" in section:
            name = section.pop("preset")
            if not isinstance(name, str) or name not in PRESETS:
                raise UserError(f"there is no optimisation preset {name!r}: choose one of {', '.join(PRESETS)}")
            table[key] = PRESETS[name] | section
    return table


def recipes() -> dict[str, str]:
    """The recipes that come with the package, and what each is about."""
    return _abouts(RECIPES)


def experiments() -> dict[str, str]:
    """The experiments that come with the package, and what each is about."""
    return _abouts(EXPERIMENTS)


def _abouts(folder: Path) -> dict[str, str]:
    tables = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
    return {name: table.get("about", "") for name, table in tables.items()}


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, thousands of digits, brackets within brackets
        raise UserError(f"the recipe {path} is not TOML ({error}): fix that place") from None
    return {"name": path.stem, **table}


def _from_python(name: str) -> dict[str, Any]:
    """Call the user's own function; a recipe is data, so it passes the same checks as TOML."""
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"there is no file {path} with a recipe function: check the path")
    try:
        recipe = runpy.run_path(path)[function]()
    except UserError:
        raise
    except KeyError:
        raise UserError(f"{path} has no function {function!r}: name one that returns a freenergy Recipe") from None
    except Exception as error:  # it is the user's code
        raise UserError(f"{name} failed with {type(error).__name__} ({error}): fix the function") from error
    if not isinstance(recipe, Recipe):
        raise UserError(f"{name} returned a {type(recipe).__name__}: it must return a freenergy Recipe")
    return recipe.to_json()


def _path(name: str, folder: Path) -> Path:
    path = Path(name)
    if len(name) > _LONGEST_PATH:
        raise UserError(f"the recipe's name has {len(name)} characters: give a path, or see `freenergy recipes`")
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(f"there is no recipe file {path}: check the path, or see `freenergy recipes`")
        return path
    if (folder / f"{name}.toml").is_file():
        return folder / f"{name}.toml"
    known = ", ".join(_abouts(folder))
    raise UserError(f"there is no recipe {name!r}: give the path of a TOML file, or one of {known}")


def _change(table: dict[str, Any], change: str) -> None:
    """Carry out one ``a.b=c``; c is read as TOML where it is TOML, else as a string."""
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise UserError(f"--set {change} is not of the form a.b=c, such as --set base.preset=small")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except (ValueError, RecursionError):
        raise UserError(f"--set {path}=… has more digits or brackets than any setting: give a value") from None
    *sections, key = path.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {change}: {section} is a value, not a section; see the recipe for its keys")
    table[key] = value
