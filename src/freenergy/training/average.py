"""A moving average of the weights during training.

    θ̄ ← d·θ̄ + (1 − d)·θ,    d = min(ema, (1 + step) / (10 + step))

The first steps count less by the second term, so that the average does not stay near the initial weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """The exponential moving average of a module's trainable weights; with ``ema`` = 0 the weights themselves."""

    def __init__(self, module: nn.Module, ema: float) -> None:
        self.ema = ema
        self._weights = {name: w for name, w in module.named_parameters() if w.requires_grad} if ema else {}
        self.tensors: dict[str, Tensor] = {name: w.detach().clone() for name, w in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average with the weights after a step."""
        d = min(self.ema, (1 + step) / (10 + step))
        for name, w in self._weights.items():
            self.tensors[name].lerp_(w, 1 - d)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the module holds the average."""
        present = {name: w.detach().clone() for name, w in self._weights.items()}
        self._fill(self.tensors)
        try:
            yield
        finally:
            self._fill(present)

    @torch.no_grad()
    def _fill(self, tensors: dict[str, Tensor]) -> None:
        for name, w in self._weights.items():
            w.copy_(tensors[name])
