"""What the settings of an energy answer: how it is built, loaded and fitted, and what it reads.

    E(c, x) is one number per continuation; every energy that learns starts at E = 0, so training starts at the base

An energy is one module: a frozen dataclass that derives from ``EnergySettings``, the ``EnergyModule`` that it builds,
and one line in ``energies.registry``. Everything else asks the settings, and names no energy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, final, runtime_checkable

from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus, Tokenizer
from freenergy.energies.module import EnergyModule
from freenergy.lm.presets import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Fit = Literal["convex", "gradient", "none"]
Pool = Literal["mean", "sum"]
Over = Literal["continuation", "all"]


@runtime_checkable
class MaskedTrunk(Protocol):
    """The settings of a network that first learns to fill masks."""

    @property
    def preset(self) -> str:
        """Return the name of its sizes, in ``lm.presets``."""
        ...

    @property
    def mask_share(self) -> float:
        """Return the share of tokens that are masked."""
        ...

    @property
    def dropout(self) -> float:
        """Return the probability of dropout."""
        ...


@final
@dataclass(frozen=True, slots=True)
class BuildInputs:
    """What an energy can be built from."""

    base: LanguageModel
    corpus: Corpus
    progress: Progress
    train_masked_trunk: "Callable[[MaskedTrunk], PreTrainedModel]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySettings(ABC):
    """The settings of one kind of energy; ``kind`` is its name in recipes, in ``energy.json`` and in the registry."""

    kind: str
    fit: ClassVar[Fit]  # one convex problem for all linear parts; gradient descent; or nothing to fit
    reads_activations: ClassVar[bool] = False  # of the base, which computes them anyway while it draws
    predicts_tokens: ClassVar[bool] = False  # its network computes log-probabilities of tokens too

    @abstractmethod
    def build(self, inputs: BuildInputs) -> EnergyModule:
        """Build the energy, at E = 0 unless it is trained already."""

    @staticmethod
    @abstractmethod
    def load(folder: Path, *, base: LanguageModel, tokenizer: Tokenizer) -> EnergyModule:
        """Load what the energy's ``save_pretrained`` wrote."""

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
    def shares_prefix(self) -> bool:
        """Return whether its network reads a prefix once for all its continuations."""
        return False

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
        """Return the shape of the network that it trains; None where it trains none."""
        return None

    def num_features(self, base: Shape | None) -> int:
        """Return how many numbers per string a linear energy reads from disk."""
        return 0
