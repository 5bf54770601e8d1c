"""What the settings of an energy answer: how it is built and fitted, and what it reads.

    E(c, x) is one number per continuation; every energy that learns starts at E = 0, so training starts at the base

An energy is one module: a frozen dataclass that derives from ``EnergySettings``, the ``EnergyModule`` that it builds,
and one line in ``energies.registry``. Everything else asks the settings, and names no energy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.energies.module import EnergyModule
from freenergy.lm.presets import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Fit = Literal["convex", "gradient", "none"]
Pool = Literal["mean", "sum"]
Over = Literal["continuation", "all"]


class BuildInputs(NamedTuple):
    """What an energy can be built from."""

    base: LanguageModel
    corpus: Corpus
    progress: Progress
    train_masked_trunk: "Callable[[str, float, float], PreTrainedModel]"  # by preset, share of masks, and dropout


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySettings(ABC):
    """The settings of one kind of energy; ``kind`` is its name in recipes, in ``energy.json`` and in the registry."""

    kind: str
    fit: ClassVar[Fit]  # one convex problem for all linear parts; gradient descent; or nothing to fit
    reads_activations: ClassVar[bool] = False  # of the base, which computes them anyway while it draws
    predicts_tokens: ClassVar[bool] = False  # its network computes log-probabilities of tokens too
    is_causal: ClassVar[bool] = False  # its network reads left to right

    @abstractmethod
    def build(self, inputs: BuildInputs) -> EnergyModule:
        """Build the energy, at E = 0 unless it is trained already."""

    def split(self) -> "tuple[EnergySettings, ...]":
        """Return the parts that are fitted one after the other: itself, unless it is a product."""
        return (self,)

    def combine(self, parts: Sequence[EnergyModule]) -> EnergyModule:
        """Return the energy whose parts, in the order of ``split``, are these."""
        (energy,) = parts
        return energy

    @property
    def learns(self) -> bool:
        """Return whether any part is fitted."""
        return any(part.fit != "none" for part in self.split())

    @property
    def reads_int8(self) -> bool:
        """Return whether its network is quantised once it is trained."""
        return False

    @property
    def trains_masked_trunk(self) -> bool:
        """Return whether its network first learns to fill masks."""
        return False

    @property
    def reads_base(self) -> bool:
        """Return whether it needs the base's network or predictions, which a base that only samples does not have."""
        return self.reads_activations or self.predicts_tokens

    @property
    def shares_prefix(self) -> bool:
        """Return whether its network reads a prefix once for all its continuations."""
        return self.is_causal

    def report(self) -> dict[str, Any]:
        """Return what the report shows of an energy that is not fitted."""
        return {"kind": self.kind}

    def fingerprints(self, stage: Path, progress: Progress) -> list[str]:
        """Fingerprint the files it reads from outside the run; ``stage`` is the folder that it is trained in."""
        return []

    def citations(self) -> dict[str, str]:
        """Return the keys of papers to cite, and what of each is used."""
        return {}

    def trunk(self, base: Shape | None, vocab_size: Callable[[], int]) -> Shape | None:
        """Return the shape of the network that it trains, the base's unless it says otherwise; None if it has none."""
        return base if self.fit == "gradient" else None

    def num_features(self, base: Shape | None) -> int:
        """Return how many numbers per string a linear energy reads from disk."""
        return 0
