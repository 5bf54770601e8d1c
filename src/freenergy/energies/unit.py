"""A causal energy that begins as the base.

    E(c, x) = w · pool(h(c, x)) + b,      h the last hidden states of a copy of the base's network

It is the UniT of Deng et al. (2020): the same network as the base, read left to right, so the prefix is read once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations, Soft
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import in_batches, wants_gradients
from freenergy.energies.int8 import Int8Energy, Int8Settings, Ranges, check_int8, put_in_int8
from freenergy.energies.pooling import Readout
from freenergy.energies.saving import copied, fill, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import BuildInputs, Fit, Over, Pool
from freenergy.energies.trunk import Trunk, readable
from freenergy.lm.presets import Shape, set_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEnergy(Int8Settings):
    """A causal trunk that begins as the base; pooled states to a scalar."""

    fit: ClassVar[Fit] = "gradient"
    kind: Literal["unit"] = "unit"
    pool: Pool = "mean"
    over: Over = "continuation"  # which states are pooled
    dropout: float = 0.0
    int8: bool = False  # once it is trained its linear layers are read in int8, on a CPU

    def __post_init__(self) -> None:
        check_range(self, "dropout", at_least=0, below=1)

    def build(self, inputs: BuildInputs) -> "Unit":
        """Start as a copy of the base."""
        return Unit(self, inputs.base)

    @staticmethod
    def load(folder: Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Unit":
        """Load the energy as it was saved."""
        return Unit.from_pretrained(folder, base=base, tokenizer=tokenizer)

    def in_int8(self) -> "UnitEnergy":
        """Return the same settings with ``int8 = true``."""
        return replace(self, int8=True)

    @property
    def shares_prefix(self) -> bool:
        """Return whether a prefix is read once: yes, it is read left to right."""
        return True

    def trunk(self, base: Shape | None, vocab_size: Callable[[], int]) -> Shape | None:
        """Return the shape of the base."""
        return base


@final
class Unit(Int8Energy):
    """``network`` is a trunk that was trained before; without it the trunk is a copy of the base's."""

    def __init__(self, settings: UnitEnergy, base: LanguageModel, *, network: "PreTrainedModel | None" = None) -> None:
        super().__init__()
        self.settings: Int8Settings = settings
        self.eos = base.eos
        trunk = network or copied(without_head(network_of(base, settings.kind)))
        self.ranges: Ranges | None = None  # of what its layers read, where they read it in int8
        if settings.int8:
            check_int8(trunk)
        set_dropout(trunk, settings.dropout)
        self.trunk = Trunk(trunk, "causal")
        self.readout = Readout(self.trunk.width, pool=settings.pool, over=settings.over, dtype=trunk.dtype)
        self.readout.to(trunk.device)

    def forward(self, x: Continuations | Soft) -> Float[Tensor, "B N"]:
        """Compute E(c, x); of soft tokens with their gradient, whether or not the weights learn."""
        x = readable(x, self.eos, self.trunk.device)
        if isinstance(x, Continuations) and not wants_gradients(self):
            return in_batches(x, self.trunk, lambda states, _: self.readout(states))
        energy: Tensor = self.readout(self.trunk(x))
        return energy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all."""
        with saved(folder, self, self.settings, self.trunk.network, ranges=self.ranges):
            pass

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Unit":
        """Return the energy as it was saved."""
        record = read_record(folder)
        energy = cls(UnitEnergy(**record["settings"]), base, network=rebuilt(folder))
        fill(folder, energy)
        if record.get("ranges") is not None:
            put_in_int8(energy, record["ranges"])
        return energy
