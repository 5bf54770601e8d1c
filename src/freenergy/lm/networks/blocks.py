"""Rows of text for a causal network: a stream of tokens cut into blocks.

    given = w_{s},    tokens = w_{s+1} … w_{s+block}

``BlockData`` takes blocks from all over the stream. ``LaneData`` reads on: step s reads the s-th block of every lane,
so that a network with a memory finds there what came before.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Batch


@final
class Blocks:
    """A stream of tokens cut into blocks, endlessly, every epoch at another offset and in another order."""

    def __init__(self, stream: np.ndarray, block: int, rng: Rng, *, name: str) -> None:
        if len(stream) < block + 1:
            raise UserError(
                f"the {name} text has {len(stream)} tokens, fewer than one block of {block + 1}: "
                "give more text or set base.block lower"
            )
        self.stream, self.block, self.rng = stream, block, rng
        self.whole = (len(stream) - 1) // block
        # one less leaves room for the offset, so that every epoch has the same number of blocks
        self.count = max(self.whole - 1, 1)
        self._epoch, self._order, self._offset = -1, torch.empty(0), 0

    def __len__(self) -> int:
        return self.count

    def rows(self, first: int, size: int) -> Int[Tensor, "rows block_plus_one"]:
        """Return rows first … first + size − 1 of the endless sequence of blocks."""
        return self.stacked([self._start(index) for index in range(first, first + size)])

    def in_order(self, first: int, last: int) -> Int[Tensor, "rows block_plus_one"]:
        """Return blocks first … last − 1 in the order of the stream."""
        return self.stacked([index * self.block for index in range(first, last)])

    def stacked(self, starts: list[int]) -> Int[Tensor, "rows block_plus_one"]:
        """Return the blocks that begin at these places."""
        rows = [self.stream[start : start + self.block + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            rng = self.rng.child("epoch", epoch)
            self._epoch, self._order = epoch, rng.permutation(self.count)
            spare = len(self.stream) - 1 - self.count * self.block
            self._offset = int(rng.child("offset").uniform(1).item() * (min(spare, self.block - 1) + 1))
        return self._offset + int(self._order[place]) * self.block


@final
class BlockData:
    """Blocks in random order. Fake rows keep the first ``known`` tokens of a block."""

    def __init__(
        self,
        train: np.ndarray,
        validation: np.ndarray,
        *,
        block: int,
        batch_size: int,
        accumulate: int,
        known: int,
        validation_tokens: int,
        rng: Rng,
    ) -> None:
        self.train = Blocks(train, block, rng.child("blocks"), name="training")
        self.validation = Blocks(validation[:validation_tokens], block, rng, name="validation")
        self.known, self.accumulate, self.micro_size = known, accumulate, batch_size // accumulate

    @property
    def epoch_steps(self) -> int:
        """Return the steps in which every block is read about once."""
        return max(1, len(self.train) // (self.micro_size * self.accumulate))

    def batch(self, step: int, micro: int) -> Batch:
        """Return the next rows of the endless sequence of blocks."""
        first = ((step - 1) * self.accumulate + micro) * self.micro_size
        return batch_of(self.train.rows(first, self.micro_size), self.known)

    def held_out(self) -> Iterator[Batch]:
        """Return the validation blocks as they stand."""
        count = self.validation.whole
        for first in range(0, count, self.micro_size):
            yield batch_of(self.validation.in_order(first, min(first + self.micro_size, count)), self.known)


@final
class LaneData:
    """Blocks in the order of the text, a lane for each row; the last blocks of an epoch may be left over."""

    def __init__(
        self, train: np.ndarray, validation: np.ndarray, *, block: int, batch_size: int, known: int,
        validation_tokens: int,
    ) -> None:  # fmt: skip
        self.known, self.lanes = known, batch_size
        self.train = _Lanes(train, block, batch_size, "training")
        self.validation = _Lanes(validation[:validation_tokens], block, 1, "validation")

    @property
    def epoch_steps(self) -> int:
        """Return the number of blocks of a lane."""
        return self.train.steps

    def batch(self, step: int, micro: int) -> Batch:
        """Return block ``step`` of every lane; after the last one the first."""
        return batch_of(self.train.at((step - 1) % self.train.steps), self.known)

    def is_first(self, step: int) -> bool:
        """Return whether nothing comes before the blocks of this step."""
        return (step - 1) % self.train.steps == 0

    def held_out(self) -> Iterator[Batch]:
        """Return the validation text from its beginning, a block at a time."""
        for place in range(self.validation.steps):
            yield batch_of(self.validation.at(place), self.known)


@final
class _Lanes:
    def __init__(self, stream: np.ndarray, block: int, lanes: int, name: str) -> None:
        self.length = (len(stream) - 1) // lanes
        self.steps = self.length // block
        if self.steps < 1:
            raise UserError(
                f"the {name} text has {len(stream)} tokens, fewer than {lanes} lanes of one block of {block}: "
                "give more text, or set base.block or the batch lower"
            )
        self.blocks, self.lanes = Blocks(stream, block, Rng(), name=name), lanes

    def at(self, place: int) -> Int[Tensor, "lanes block_plus_one"]:
        return self.blocks.stacked([lane * self.length + place * self.blocks.block for lane in range(self.lanes)])


def batch_of(rows: Int[Tensor, "rows block_plus_one"], known: int) -> Batch:
    """Return blocks with the token before each."""
    tokens = rows[:, 1:]
    return Batch(rows[:, :1], tokens, torch.ones_like(tokens, dtype=torch.bool), known)
