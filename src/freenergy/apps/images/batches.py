"""Rows of images for training.

    row r of micro-batch m of step s = image order_e[k],   k + e · N = ((s − 1) · accumulate + m) · size + r

Every epoch e reads the N images in another order, from the seed. A fake row shares the first ``known`` pixels with its
image; ``known`` is uniform among the places that leave room for ``fake`` more, one for all rows of a micro-batch, so
that in time every place is drawn from.
"""

from collections.abc import Iterator
from typing import final

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Batch

_HELD_OUT_ROWS = 100  # per batch


@final
class ImageData:
    """Images as rows of levels: an endless stream of training batches, and held-out images."""

    def __init__(
        self,
        train: UInt8[Tensor, "images pixels"],
        held_out: UInt8[Tensor, "others pixels"],
        *,
        batch_size: int,
        accumulate: int,
        fake: int,
        rng: Rng,
    ) -> None:
        self.train, self._held_out = train, held_out
        self.pixels = train.shape[1]
        if fake > self.pixels:
            raise UserError(f"fake is {fake}, more than the {self.pixels} pixels of an image: set it lower")
        self.batch_size, self.accumulate, self.fake, self.rng = batch_size, accumulate, fake, rng
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def epoch_steps(self) -> int:
        """The steps of about one epoch."""
        return max(1, len(self.train) // self.batch_size)

    def batch(self, step: int, micro: int) -> Batch:
        """Return the rows of a micro-batch."""
        size = self.batch_size // self.accumulate
        number = (step - 1) * self.accumulate + micro
        rows = torch.tensor([self._image(index) for index in range(number * size, (number + 1) * size)])
        u = self.rng.child("known", number).uniform(1).item()
        return _batch(self.train[rows], int(u * (self.pixels - self.fake + 1)))

    def held_out(self) -> Iterator[Batch]:
        """Yield the validation images, in order."""
        for part in self._held_out.split(_HELD_OUT_ROWS):
            yield _batch(part, 0)

    def _image(self, index: int) -> int:
        epoch, place = divmod(index, len(self.train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.rng.child("epoch", epoch).permutation(len(self.train))
        return int(self._order[place])


def _batch(levels: UInt8[Tensor, "rows pixels"], known: int) -> Batch:
    tokens: Int[Tensor, "rows pixels"] = levels.long()
    return Batch(None, tokens, torch.ones_like(tokens, dtype=torch.bool), known)
