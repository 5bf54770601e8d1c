"""A recipe: everything that a run is told, from TOML (or Python) to frozen dataclasses.

This is the only place that reads what users write in recipes, and the only one that imports pydantic: unknown keys and
wrong types are refused here with their path, and everything below works on checked values.
"""

import json
import runpy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from freenergy.apps.images.settings import ImageSubject
from freenergy.apps.translation.settings import TranslationSubject
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.corpus.resources import RESOURCES
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.energies.registry import ENERGIES, AnyEnergy, settings_class
from freenergy.lm.settings import NgramBase, PretrainedBase, RemoteBase
from freenergy.noise.settings import BaseNegatives, InfilledNegatives, LearnedNegatives, NegativeSettings
from freenergy.objectives import EARM, BinaryNCE, RankingNCE
from freenergy.recipes.errors import Complaints
from freenergy.recipes.experiment.plan import Experiment
from freenergy.recipes.experiment.settings import Base, Continued, LanguageSubject, Row, Study
from freenergy.training.baselines.settings import (
    BalmBaseline,
    BaselineSettings,
    LocalBaseline,
    LongerBaseline,
    RalmBaseline,
    check_baselines,
)
from freenergy.training.lm_loss import LanguageModelLoss, ScheduledSampling
from freenergy.training.settings import PRESETS, EnergyTraining, Optimisation, TrainedBase

RECIPES = Path(__file__).parent
EXPERIMENTS = RECIPES / "experiments"
_LONGEST_NAME, _LONGEST_PATH = 100, 1000
_DEFAULT_KINDS = {"tokenizer": "bpe", "base": "train"}
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What is measured and shown at the end of a run."""

    split: Literal["train", "validation", "test"] = "test"
    windows: int = 400
    samples: int = 3  # continuations shown, each of another held-out prefix
    candidates: int = 256  # n of the certificate, the true continuation among them
    certified_windows: int = 100  # on which the residual model is measured
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
    energy: Annotated[AnyEnergy, Field(discriminator="kind")] | None = None  # none: the base alone is measured
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


_TEACHING: tuple[type, ...] = (
    CorpusSettings, BytePairTokenizer, WordTokenizer, PretrainedTokenizer, Optimisation, EARM, ScheduledSampling,
)  # fmt: skip
_SECTIONS: tuple[type, ...] = (
    Recipe, *_TEACHING, TrainedBase, NgramBase, PretrainedBase, RemoteBase, EvaluationSettings, NegativeSettings,
    BaseNegatives, InfilledNegatives, LearnedNegatives, *map(settings_class, ENERGIES), EnergyTraining, BinaryNCE,
    RankingNCE, LongerBaseline, BalmBaseline, RalmBaseline, LocalBaseline,
)  # fmt: skip
_OF_EXPERIMENTS: tuple[type, ...] = (
    Experiment, *_TEACHING, LanguageModelLoss, Base, Continued, Row, Study, LanguageSubject, TranslationSubject,
    ImageSubject,
)  # fmt: skip
for _section in {*_SECTIONS, *_OF_EXPERIMENTS}:
    with_config(ConfigDict(extra="forbid", strict=True))(_section)
_ADAPTER, _COMPLAINTS = TypeAdapter(Recipe), Complaints(_SECTIONS)
_EXPERIMENT, _OBJECTIONS = TypeAdapter(Experiment), Complaints(_OF_EXPERIMENTS)


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, one that comes with the package, or ``file.py:function`` that returns a Recipe.

    ``changes`` are ``a.b=c``, carried out before the recipe is checked.

    >>> load_recipe("demo", ["seed=3"]).seed
    3
    """
    table = _from_python(name) if ".py:" in name else _from_toml(_path(name, RECIPES))
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
    parts = energy.get("parts") if isinstance(energy, dict) else None
    for i, part in enumerate(parts if isinstance(parts, list | tuple) else ()):
        if isinstance(part, dict) and "kind" not in part:
            raise UserError(f'{origin}: energy.parts.{i} has no kind; say which energy it is, such as "ngram"')
    return _checked(_ADAPTER.validate_json, _COMPLAINTS, table, origin)


def load_experiment(name: str, changes: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file, or one that comes with the package; ``changes`` as in ``load_recipe``.

    >>> load_experiment("earm-wikitext", ["seeds=[7]"]).seeds
    (7,)
    """
    table = _from_toml(_path(name, EXPERIMENTS))
    for change in changes:
        _change(table, change)
    return make_experiment(table, origin=name)


def make_experiment(table: Mapping[str, Any], *, origin: str = "experiment") -> Experiment:
    """Check a table of settings; a variant is the subject with some keys changed."""
    table = _with_presets(dict(table))
    subject, variants = table.get("subject"), table.get("variants", {})
    if not isinstance(subject, dict) or "kind" not in subject:
        raise UserError(f"{origin}: subject.kind is missing; choose one of 'language', 'translation', 'images'")
    if isinstance(subject.get("tokenizer"), dict):
        subject = subject | {"tokenizer": {"kind": _DEFAULT_KINDS["tokenizer"], **subject["tokenizer"]}}
    if not isinstance(variants, dict) or not all(isinstance(keys, dict) for keys in variants.values()):
        raise UserError(f"{origin}: variants must be sections, as in [variants.NAME], with keys of the subject")
    table |= {"subject": subject, "variants": {variant: subject | keys for variant, keys in variants.items()}}
    return _checked(_EXPERIMENT.validate_json, _OBJECTIONS, table, origin)


def _checked(validate: Callable[[str], T], complaints: Complaints, table: dict[str, Any], origin: str) -> T:
    try:
        # as JSON, since pydantic's strict mode wants instances of dataclasses from Python
        return validate(json.dumps(table, default=str))
    except ValidationError as error:
        raise UserError(complaints.sentence(error.errors(), origin, table)) from None


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
