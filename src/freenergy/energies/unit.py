"""A causal energy that begins as the base.

    E(c, x) = w · pool(h(c, x)) + b,      h the last hidden states of a copy of the base's network

It is the UniT of Deng et al. (2020): the same network as the base, read left to right, so the prefix is read once.
"""

from pathlib import Path
from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import in_batches, wants_gradients
from freenergy.energies.int8 import Ranges, check_int8, put_in_int8
from freenergy.energies.pooling import Readout
from freenergy.energies.saving import copied, fill, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import UnitEnergy
from freenergy.energies.trunk import Trunk, readable
from freenergy.lm.presets import set_dropout


@final
class Unit(nn.Module):
    """``network`` is a trunk that was trained before; without it the trunk is a copy of the base's."""

    def __init__(self, settings: UnitEnergy, base: LanguageModel, *, network: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.settings, self.eos = settings, base.eos
        trunk = network or copied(without_head(network_of(base, "Unit")))
        self.ranges: Ranges | None = None  # of what its layers read, where they read it in int8
        if settings.int8:
            check_int8(trunk)
        set_dropout(trunk, settings.dropout)
        self.trunk = Trunk(trunk, "causal")
        self.readout = Readout(self.trunk.width, pool=settings.pool, over=settings.over, dtype=trunk.dtype)
        self.readout.to(trunk.device)

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """E(c, x)."""
        x = readable(x, self.eos, self.trunk.device)
        if not wants_gradients(self):
            return in_batches(x, self.trunk, lambda states, _: self.readout(states))
        energy: Tensor = self.readout(self.trunk(x))
        return energy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, whole or not at all."""
        with saved(folder, self, self.settings, self.trunk.network, ranges=self.ranges):
            pass

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Unit":
        """The energy as it was saved."""
        record = read_record(folder)
        energy = cls(UnitEnergy(**record["settings"]), base, network=rebuilt(folder))
        fill(folder, energy)
        if record.get("ranges") is not None:
            put_in_int8(energy, record["ranges"])
        return energy
