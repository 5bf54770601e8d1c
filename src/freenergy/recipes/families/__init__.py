"""Families of recipes: each lists the sections of its recipes in one dataclass, and returns their stages.

A family is imported when a recipe names it, so a family may live in any package. To add one, write its class and add a
line here.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from freenergy.core.device import AUTO, check_device_name
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.runs.run import Stage

_LONGEST_NAME = 100
DEFAULT = "residual"
FAMILIES = {
    DEFAULT: "freenergy.recipes.families.residual:ResidualRecipe",
    "language-model": "freenergy.recipes.families.language_model:LanguageModelRecipe",
    "known-law": "freenergy.recipes.families.known_law:KnownLawRecipe",
    "random-field": "freenergy.recipes.families.random_field:RandomFieldRecipe",
    "translation": "freenergy.apps.translation.domain:TranslationRecipe",
    "images": "freenergy.apps.images.domain:ImagesRecipe",
    "tagging": "freenergy.recipes.families.tagging:TaggingRecipe",
}


def family_class(name: Any) -> type[Any]:
    """Returns the class of a family's recipes."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"family is {str(name)[:40]!r}: choose one of {', '.join(FAMILIES)}")
    module, _, attribute = FAMILIES[name].partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRecipe(ABC):
    """Name, description, seed and device. The seed decides every random choice of a run.

    Where the run computes is no part of the stages' keys: a run begun on one device goes on on another.
    ``fallback`` names the recipe that `freenergy run` takes instead where a text or a model cannot be fetched.
    """

    name: str
    about: str = ""
    fallback: str = ""
    seed: int = 0
    device: str = AUTO

    def __post_init__(self) -> None:
        Rng(self.seed)  # refuses a bad one
        check_device_name(self.device)
        if not self.name or len(self.name) > _LONGEST_NAME or set(self.name) & set("/\\\0") or self.name in (".", ".."):
            raise UserError(f"name is {self.name[:40]!r}: take up to {_LONGEST_NAME} characters without slashes")

    @abstractmethod
    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages of a run, in order."""

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as JSON-like values."""
        return asdict(self)
