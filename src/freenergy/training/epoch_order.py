"""Which windows a micro-batch has: a new order every epoch, whole batches only.

    step = epoch e and place k,      micro-batch m = order_e[k·batch + m·size : … + size],   size = batch / accumulate

The order of an epoch is drawn by its number alone, so nothing has to be saved to resume. It is drawn once per
epoch, since with many windows that takes longer than a step.
"""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.training.settings import Optimisation


@final
class Shuffled:
    """The numbers of ``count`` windows, batch by batch."""

    def __init__(self, count: int, steps: Optimisation, rng: Rng) -> None:
        self._count, self._batch, self._rng = count, steps.batch_size, rng
        self._size = steps.batch_size // steps.accumulate
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __call__(self, step: int, micro: int) -> Int[Tensor, " size"]:
        """Those of a micro-batch; steps count from 1."""
        epoch, place = divmod(step - 1, self._count // self._batch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._rng.child("epoch", epoch).permutation(self._count)
        first = place * self._batch + micro * self._size
        return self._order[first : first + self._size]
