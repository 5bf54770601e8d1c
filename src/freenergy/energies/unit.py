"""A causal energy that begins as the base.

    E(c, x) = w · pool(h(c, x)) + b,      h the last hidden states of a copy of the base's network

It is the UniT of Deng et al. (2020): the same network as the base, read left to right, so the prefix is read once.
"""

from pathlib import Path
from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from freenergy.base.presets import set_dropout
from freenergy.corpus import Tokenizer
from freenergy.energies.pooling import Readout
from freenergy.energies.saving import copied, fill, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import UnitEnergy
from freenergy.energies.trunk import Trunk, readable
from freenergy.protocols import LanguageModel
from freenergy.sequences import Continuations


@final
class Unit(nn.Module):
    """``network`` is a trunk that was trained before; without it the trunk is a copy of the base's."""

    def __init__(self, settings: UnitEnergy, base: LanguageModel, *, network: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.settings, self.eos = settings, base.eos
        trunk = network or copied(without_head(network_of(base, "Unit")))
        set_dropout(trunk, settings.dropout)
        self.trunk = Trunk(trunk, "causal")
        self.readout = Readout(self.trunk.width, pool=settings.pool, over=settings.over, dtype=trunk.dtype)
        self.readout.to(trunk.device)

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """E(c, x)."""
        x = readable(x, self.eos, self.trunk.device)
        energy: Tensor = self.readout(self.trunk(x))
        return energy

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, whole or not at all."""
        with saved(folder, self, self.settings, self.trunk.network):
            pass

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Unit":
        """The energy as it was saved."""
        energy = cls(UnitEnergy(**read_record(folder)["settings"]), base, network=rebuilt(folder))
        fill(folder, energy)
        return energy
