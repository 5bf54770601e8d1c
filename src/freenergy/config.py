"""A recipe: everything that a run is told, from TOML (or Python) to frozen dataclasses.

This is the only place that reads what users write in recipes, and the only one that imports pydantic: unknown keys and
wrong types are refused here with their path, and everything below works on checked values.
"""

import difflib
import json
import runpy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from freenergy.base.settings import NgramBase, PretrainedBase, RemoteBase
from freenergy.baselines.settings import (
    BalmBaseline,
    BaselineSettings,
    LocalBaseline,
    LongerBaseline,
    RalmBaseline,
    check_baselines,
)
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.energies.settings import (
    BitEnergy,
    EnergySettings,
    LogRatioEnergy,
    NgramEnergy,
    ProbeEnergy,
    ProductEnergy,
    SavedEnergy,
    UnitEnergy,
)
from freenergy.errors import UserError
from freenergy.negatives.settings import BaseNegatives, InfilledNegatives, NegativeSettings
from freenergy.objectives import BinaryNCE, ConditionalNCE, RankingNCE
from freenergy.randomness import Rng
from freenergy.resources import RESOURCES
from freenergy.training.settings import PRESETS, EnergyTraining, Optimisation, TrainedBase

RECIPES = Path(__file__).parent / "recipes"
_LONGEST_NAME, _LONGEST_PATH = 100, 1000
_DEFAULT_KINDS = {"tokenizer": "bpe", "base": "train"}
_UNIONS = ("tokenizer", "base", "energy", "objective")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What is measured and shown at the end of a run."""

    split: Literal["train", "validation", "test"] = "test"
    windows: int = 400
    samples: int = 3  # continuations shown, each of another held-out prefix
    candidates: int = 256  # n of the certificate, the true continuation among them
    certified_windows: int = 100  # on which the joint model is measured
    position_windows: int = 0  # on which it is measured place by place: slow, since every place needs completions
    position_draws: int = 32  # completions at each place

    def __post_init__(self) -> None:
        if self.windows < 1 or self.samples < 0:
            raise UserError(f"windows is {self.windows} and samples {self.samples}: set them to at least 1 and 0")
        if self.candidates < 3 or self.certified_windows < 1:
            raise UserError(
                f"candidates is {self.candidates} and certified_windows {self.certified_windows}: set them to at least "
                "3 and 1, since the upper estimate of log Z is undefined with fewer than two draws beside the true text"
            )
        if self.position_windows < 0 or self.position_draws < 2:
            raise UserError(
                f"position_windows is {self.position_windows} and position_draws {self.position_draws}: set them to at "
                "least 0 and 2"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run. The seed decides every random choice in it."""

    name: str
    about: str = ""
    seed: int = 0
    corpus: CorpusSettings
    tokenizer: Annotated[BytePairTokenizer | WordTokenizer | PretrainedTokenizer, Field(discriminator="kind")] = field(
        default_factory=BytePairTokenizer
    )
    base: Annotated[TrainedBase | NgramBase | PretrainedBase | RemoteBase, Field(discriminator="kind")] = field(
        default_factory=TrainedBase
    )
    negatives: NegativeSettings = field(default_factory=NegativeSettings)
    energy: Annotated[EnergySettings, Field(discriminator="kind")] | None = None  # none: the base alone is measured
    training: EnergyTraining = field(default_factory=EnergyTraining)
    baselines: tuple[Annotated[BaselineSettings, Field(discriminator="kind")], ...] = ()  # what it is measured against
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        Rng(self.seed)  # refuses a bad one
        check_baselines(self.baselines)
        if not self.name or len(self.name) > _LONGEST_NAME or set(self.name) & set("/\\\0") or self.name in (".", ".."):
            raise UserError(f"name is {self.name[:40]!r}: take up to {_LONGEST_NAME} characters without slashes")
        if self.corpus.source in RESOURCES:
            has_test = "test" in RESOURCES[self.corpus.source].splits or RESOURCES[self.corpus.source].kind != "text"
        else:
            has_test = self.corpus.test_share > 0 if self.corpus.source else bool(self.corpus.test)
        if self.evaluation.split == "test" and not has_test:
            raise UserError(
                'the corpus has no test text: set evaluation.split = "validation", or give corpus.test or test_share'
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON-like values."""
        return asdict(self)


_SECTIONS: tuple[type, ...] = (
    Recipe, CorpusSettings, BytePairTokenizer, WordTokenizer, PretrainedTokenizer, TrainedBase, NgramBase,
    PretrainedBase, RemoteBase, Optimisation, EvaluationSettings, NegativeSettings, BaseNegatives, InfilledNegatives,
    UnitEnergy, BitEnergy, LogRatioEnergy, ProbeEnergy, NgramEnergy, SavedEnergy, ProductEnergy, EnergyTraining,
    BinaryNCE, RankingNCE, ConditionalNCE, LongerBaseline, BalmBaseline, RalmBaseline, LocalBaseline,
)  # fmt: skip
_CLASSES = {section.__name__: f.default for section in _SECTIONS for f in fields(section) if f.name == "kind"}
_KINDS = set(_CLASSES.values())
for _section in _SECTIONS:
    with_config(ConfigDict(extra="forbid", strict=True))(_section)
_ADAPTER = TypeAdapter(Recipe)


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, one that comes with the package, or ``file.py:function`` that returns a Recipe.

    ``changes`` are ``a.b=c``, carried out before the recipe is checked.

    >>> load_recipe("demo", ["seed=3"]).seed
    3
    """
    table = _from_python(name) if ".py:" in name else _from_toml(_path(name))
    for change in changes:
        _change(table, change)
    return make_recipe(table, origin=name)


def make_recipe(table: Mapping[str, Any], *, origin: str = "recipe") -> Recipe:
    """Check a table of settings."""
    table = _with_presets(dict(table))
    for section, kind in _DEFAULT_KINDS.items():
        if isinstance(table.get(section), dict):
            table[section] = {"kind": kind, **table[section]}
    energy = table.get("energy")
    for i, part in enumerate(energy.get("parts", ()) if isinstance(energy, dict) else ()):
        if isinstance(part, dict) and "kind" not in part:
            raise UserError(f'{origin}: energy.parts.{i} has no kind; say which energy it is, such as "ngram"')
    try:
        # as JSON, since pydantic's strict mode wants instances of dataclasses from Python
        return _ADAPTER.validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise UserError(_sentence(error, origin, table)) from None


def _with_presets(table: dict[str, Any]) -> dict[str, Any]:
    """Fill in ``preset = NAME`` of optimisation sections; keys beside it win."""
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
            if name not in PRESETS:
                raise UserError(f"there is no optimisation preset {name!r}: choose one of {', '.join(PRESETS)}")
            table[key] = PRESETS[name] | section
    return table


def recipes() -> dict[str, str]:
    """The recipes that come with the package, and what each is about."""
    tables = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.glob("*.toml"))}
    return {name: table.get("about", "") for name, table in tables.items()}


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the recipe {path} is not TOML ({error}): mend that place") from None
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
        raise UserError(f"{name} failed with {type(error).__name__} ({error}): mend the function") from error
    if not isinstance(recipe, Recipe):
        raise UserError(f"{name} returned a {type(recipe).__name__}: it must return a freenergy Recipe")
    return recipe.to_json()


def _path(name: str) -> Path:
    path = Path(name)
    if len(name) > _LONGEST_PATH:
        raise UserError(f"the recipe's name has {len(name)} characters: give a path, or see `freenergy recipes`")
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(f"there is no recipe file {path}: check the path, or see `freenergy recipes`")
        return path
    if (RECIPES / f"{name}.toml").is_file():
        return RECIPES / f"{name}.toml"
    known = ", ".join(recipes())
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
    *sections, key = path.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {change}: {section} is a value, not a section; see the recipe for its keys")
    table[key] = value


def _sentence(error: ValidationError, origin: str, table: Mapping[str, Any]) -> str:
    """The first complaint of pydantic, as one sentence with the path of the key."""
    # it tries every class of a union: what it says of the classes that the recipe did not mean is no complaint
    first = next((e for e in error.errors() if _is_meant(e["loc"], table)), error.errors()[0])
    # after these keys, and in their lists, the path names the class or kind that was tried, which is no key
    before = ["", *first["loc"]]
    parts = [str(part) for last, part in zip(before, first["loc"], strict=False) if not _names_kind(last, part)]
    path = ".".join(parts) or "the recipe"
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"{origin}: unknown key {path}{_near(parts[-1])}"
        case "missing" | "missing_argument":
            return f"{origin}: {path} is missing; set it in the recipe"
        case "value_error":
            return f"{origin}, {path}: {str(first['msg']).removeprefix('Value error, ')}"
        case "union_tag_invalid":
            return f"{origin}: {path}.kind is {first['ctx']['tag']!r}; choose one of {first['ctx']['expected_tags']}"
        case "literal_error" if parts[-1] == "kind":
            tried = [e["ctx"]["expected"] for e in error.errors() if e["type"] == "literal_error"]
            return f"{origin}: {path} is {first['input']!r}; choose one of {', '.join(tried)}"
        case _:
            shown = repr(first["input"])[:60]
            return f"{origin}: {path} is {shown}: {first['msg'][0].lower()}{first['msg'][1:]}; change it"


def _is_meant(loc: tuple[str | int, ...], table: Any) -> bool:
    """False where an error is about a class of another kind than the recipe names."""
    for part in loc:
        if part in _CLASSES and isinstance(table, dict):
            kind = table.get("kind")
            if kind in _KINDS and kind != _CLASSES[str(part)]:
                return False
        elif isinstance(table, dict | list) and not _names_kind("base", part):
            table = table[part] if part in table or isinstance(part, int) else None  # type: ignore[index]
    return True


def _names_kind(last: str | int, part: str | int) -> bool:
    return part in _CLASSES or (part in _KINDS and (last in _UNIONS or isinstance(last, int)))


def _near(key: str) -> str:
    names = {f.name for section in _SECTIONS if is_dataclass(section) for f in fields(section)}
    close = difflib.get_close_matches(key, names, n=1)
    return f" (did you mean {close[0]}?)" if close else "; take it out, or see the docs for the keys of this section"
