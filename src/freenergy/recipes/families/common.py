"""What recipes of all families have in common."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.runs.run import Stage

_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRecipe(ABC):
    """Name, description and seed. The seed decides every random choice of a run.

    ``fallback`` names the recipe that `freenergy run` takes instead where a text or a model of this one cannot be
    fetched.
    """

    name: str
    about: str = ""
    fallback: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        Rng(self.seed)  # refuses a bad one
        if not self.name or len(self.name) > _LONGEST_NAME or set(self.name) & set("/\\\0") or self.name in (".", ".."):
            raise UserError(f"name is {self.name[:40]!r}: take up to {_LONGEST_NAME} characters without slashes")

    @abstractmethod
    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages of a run, in order."""

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as JSON-like values."""
        return asdict(self)
