"""What code may ask of an energy beyond E(c, x): each capability is declared, and checked with ``isinstance``."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.progress import Progress
from freenergy.core.roles import Energy, LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.lm.activations import Trace


@runtime_checkable
class Persistent(Protocol):
    """Anything that can be saved to a folder."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write it, completely or not at all."""
        ...


class EnergyModule(nn.Module, ABC):
    """An energy of this package: weights that can be trained, saved and loaded."""

    @abstractmethod
    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute E(c, x)."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "EnergyModule":
        """Load what ``save_pretrained`` wrote, for the base and the tokenizer of its training, if it has a kind."""
        raise NotImplementedError(cls.__name__)

    def diagnose(self, validation: Callable[[], Continuations], progress: Progress) -> dict[str, Any]:
        """Report what it could not read exactly of held-out text; ``validation`` loads that text."""
        return {}


@runtime_checkable
class EnergySum(Protocol):
    """An energy that is a weighted sum of energies."""

    def terms(self) -> list[tuple[float, nn.Module]]:
        """Return the scale and the energy of each term."""
        ...


@runtime_checkable
class ActivationEnergy(Energy, Protocol):
    """An energy of what its base computes while it draws."""

    base: LanguageModel
    layers: tuple[int, ...]
    after: bool  # its states are those after each token

    def features_of(self, trace: Trace) -> Float[Tensor, "B N F"]:
        """Compute φ of continuations whose activations in ``layers`` were recorded."""
        ...

    def energy_of_trace(self, trace: Trace) -> Float[Tensor, "B N"]:
        """Compute E of continuations whose activations in ``layers`` were recorded."""
        ...


@runtime_checkable
class LogBaseEnergy(Energy, Protocol):
    """An energy that is cheaper where log P_LM(x | c) is known: its call takes ``log_base=``."""

    def log_base(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c) by the code of the energy."""
        ...
