"""A causal energy that begins as the base.

    E(c, x) = w · pool(h(c, x)) + b,      h the last hidden states of a copy of the base's network

It is the UniT of Deng et al. (2020): the same network as the base, read left to right, so the prefix is read once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations, Soft
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import in_batches, wants_gradients
from freenergy.energies.int8 import Int8Energy, Int8Settings
from freenergy.energies.saving import copied, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import BuildInputs
from freenergy.energies.trunk import readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEnergy(Int8Settings):
    """A causal trunk that begins as the base; pooled states to a scalar."""

    is_causal: ClassVar[bool] = True
    kind: Literal["unit"] = "unit"

    @property
    def reads_base(self) -> bool:
        """Return True: its network starts as the base's."""
        return True

    def build(self, inputs: BuildInputs) -> "Unit":
        """Start as a copy of the base."""
        return Unit(self, inputs.base)


@final
class Unit(Int8Energy):
    """``network`` is a trunk that was trained before; without it the trunk is a copy of the base's."""

    def __init__(self, settings: UnitEnergy, base: LanguageModel, *, network: "PreTrainedModel | None" = None) -> None:
        trunk = network or copied(without_head(network_of(base, settings.kind)))
        super().__init__(settings, trunk, "causal", eos=base.eos)

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
        energy = cls(UnitEnergy(**read_record(folder)["settings"]), base, network=rebuilt(folder))
        energy._fill(folder)
        return energy
