"""The residual auto-regressive language model (Eq. 6 of Deng et al. 2020).

    log P(v | h) = log P_LM(v | h) + log P_φ(v | h) + const,      log P_φ = W · h_φ + const

P_φ is a copy of the base with a head of its own that starts at W = 0, so that P starts as the base; the copy's states
begin as the base's. The base stays as it is. A head that began as the base's would start at P_LM², and one that began
at the difference to it would be the base trained longer under another name.
"""

import copy
from pathlib import Path
from typing import final

import torch
from torch import nn
from transformers import PreTrainedModel

from freenergy.core.sequences import Sequences
from freenergy.energies.saving import copied
from freenergy.lm.checkpoints import load_checkpoint, save_checkpoint
from freenergy.lm.presets import set_dropout
from freenergy.training.baselines.residual import Correction, Reading, network_reader


@final
class Ralm(nn.Module):
    """f = the logits of a network of its own."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self._read = network_reader(network)

    @classmethod
    def from_base(cls, network: PreTrainedModel, *, dropout: float = 0.0) -> "Ralm":
        """A copy of the base's network that says nothing yet."""
        twin = copied(network)
        twin.config.get_text_config().tie_word_embeddings = False
        twin.config.tie_word_embeddings = False
        head = copy.deepcopy(twin.get_output_embeddings())
        with torch.no_grad():
            for weight in head.parameters():
                weight.zero_()
        twin.set_output_embeddings(head)
        set_dropout(twin, dropout)
        return cls(twin)

    def forward(self, rows: Sequences, reading: Reading) -> Correction:
        """Read the strings; what is returned gives f at places."""
        own = self._read(rows)
        return lambda at, log_p: own.scores(at)

    def save(self, folder: Path, *, eos: int) -> None:
        """Write the network, completely or not at all."""
        save_checkpoint(self.network, folder, eos=eos)

    @classmethod
    def open(cls, folder: Path) -> "Ralm":
        """Read what ``save`` wrote."""
        return cls(load_checkpoint(folder)[0])
