"""The local counterpart of a probe: the base's own states, used place by place.

    f(v | h) = (U · A · z(h))_v + (a + b · H(p) / log V) · log p(v)

z are the hidden states of the layers that a probe energy reads, each scaled to mean 0 and variance 1; p is the law that
is corrected, H its entropy: the second term tempers it, more or less where it is unsure. U, a and b start at 0. That of
n-grams is a mix that a base may have as well (``lm.adapted``).

Legend: m places, V vocabulary, K layers of width H, r rank.
"""

import math
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn

from freenergy.core.files import atomic_write, read_tensors
from freenergy.core.rng import Rng
from freenergy.core.sequences import Sequences
from freenergy.training.baselines.residual import Correction, Reading


@final
class LocalProbe(nn.Module):
    """A low-rank map from hidden states to the vocabulary, and a temperature."""

    def __init__(self, *, layers: int, width: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(rank, layers * width))
        self.U = nn.Parameter(torch.zeros(vocab_size, rank))
        self.a_b = nn.Parameter(torch.zeros(2))

    def start(self, rng: Rng) -> None:
        """Draw A; with U = 0 it says nothing yet."""
        rank, width = self.A.shape
        with torch.no_grad():
            self.A.copy_(rng.normal(rank, width) / math.sqrt(width))

    def forward(self, rows: Sequences, reading: Reading) -> Correction:
        """Returns f at places where log P is ``log_p``."""
        return lambda at, log_p: self.f(reading.states(at), log_p)

    def f(self, states: Float[Tensor, "m K H"], log_p: Float[Tensor, "m V"]) -> Float[Tensor, "m V"]:
        """f from states and from the law that is corrected."""
        z = nn.functional.layer_norm(states, states.shape[-1:]).flatten(1).to(self.A)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        a, b = self.a_b
        tempered: Tensor = (a + b * entropy / math.log(log_p.shape[1])) * log_p
        return z @ self.A.T @ self.U.T + tempered

    def save(self, path: Path) -> None:
        """Write the weights, completely or not at all."""
        with atomic_write(path) as aside:
            save_file({name: weight.detach().contiguous() for name, weight in self.named_parameters()}, aside)

    @classmethod
    def open(cls, path: Path) -> "LocalProbe":
        """Read what ``save`` wrote."""
        weights = read_tensors(path)
        rank, width = weights["A"].shape
        probe = cls(layers=1, width=width, rank=rank, vocab_size=len(weights["U"]))
        probe.load_state_dict(weights)
        return probe
