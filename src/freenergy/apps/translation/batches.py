"""Pairs as tokens, in batches of sentences of similar length.

    a batch = rows of the pairs sorted by target length,      rows · (longest target among them) ≤ tokens

Each epoch sorts them again: pairs of the same target length stand by source length with some noise, and the batches in
another order, both from the seed. Lengths stand in the same order in every epoch, so every epoch has the same batches
by their sizes, and batch number i is known without those before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from freenergy.apps.translation.pairs import Pairs
from freenergy.apps.translation.translator import Source
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.corpus import Tokenizer
from freenergy.lm.networks.protocol import Batch

_NOISE = 4.0  # tokens of source length that pairs of a batch may differ by


@final
@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Tokens of sentences and of their translations, each with its EOS at the end."""

    source: list[list[int]]
    target: list[list[int]]

    @classmethod
    def of(cls, pairs: Pairs, tokenizer: Tokenizer) -> "EncodedPairs":
        """Encode both sides."""
        return cls(
            *([[*ids, tokenizer.eos] for ids in tokenizer.encode_batch(side)] for side in (pairs.source, pairs.target))
        )

    def fitting(self, longest: int) -> "EncodedPairs":
        """Return the pairs without those in which a side has more tokens."""
        return self.only([i for i in range(len(self)) if max(len(self.source[i]), len(self.target[i])) <= longest])

    def cut(self, longest: int) -> "EncodedPairs":
        """Return every pair; longer sentences are cut, and end with EOS."""
        return EncodedPairs(
            *([[*ids[:-1][: longest - 1], ids[-1]] for ids in side] for side in (self.source, self.target))
        )

    def __len__(self) -> int:
        return len(self.source)

    def only(self, rows: Sequence[int]) -> "EncodedPairs":
        """Return some of the pairs."""
        return EncodedPairs([self.source[i] for i in rows], [self.target[i] for i in rows])

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return some pairs as padded arrays."""
        return Batch(sources(self.source, rows), *padded([self.target[i] for i in rows]))


def sources(sentences: Sequence[list[int]], rows: Sequence[int]) -> Source:
    """Return some sentences as the input of a translator."""
    return Source(*padded([sentences[i] for i in rows]))


def padded(lists: Sequence[list[int]]) -> tuple[Int[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Return lists of tokens as one array with its mask; the padding repeats the last token, EOS."""
    T = max(map(len, lists))
    tokens = torch.tensor([[*ids, *[ids[-1]] * (T - len(ids))] for ids in lists])
    lengths = torch.tensor([len(ids) for ids in lists])
    return tokens, torch.arange(T) < lengths.unsqueeze(1)


def cut(ascending: Sequence[int], tokens: int) -> list[range]:
    """Split sorted lengths into batches of as many rows as fit ``tokens`` with padding, and at least one."""
    batches, first = [], 0
    for last, length in enumerate(ascending):
        if last > first and (last + 1 - first) * length > tokens:
            batches.append(range(first, last))
            first = last
    return [*batches, range(first, len(ascending))]


def by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return row numbers in batches of similar length."""
    order = np.argsort(np.array(lengths), kind="stable")
    return [order[list(places)].tolist() for places in cut([lengths[i] for i in order], tokens)]


@final
class PairData:
    """Training pairs in batches of about ``batch_size`` target tokens per step, and validation pairs in order."""

    def __init__(
        self,
        train: EncodedPairs,
        validation: EncodedPairs,
        *,
        batch_size: int,
        accumulate: int,
        held_out_tokens: int,
        rng: Rng,
    ) -> None:
        self.train, self.validation, self.rng = train, validation, rng.child("pairs")
        self.accumulate, self.held_out_tokens = accumulate, held_out_tokens
        self._source, self._target = (np.array([len(ids) for ids in side]) for side in (train.source, train.target))
        longest, tokens = int(self._target.max()), batch_size // accumulate
        if tokens < longest:
            raise UserError(
                f"a micro-batch of {tokens} target tokens is too small for the longest sentence of {longest}: for "
                f"translations batch_size counts tokens, so set it to {longest * accumulate} or more, such as 2048"
            )
        self._batches = cut(np.sort(self._target).tolist(), tokens)
        self._epoch = -1
        self._rows: Integer[np.ndarray, " pairs"] = np.zeros(0, dtype=np.int64)
        self._order: list[int] = []

    @property
    def epoch_steps(self) -> int:
        """The optimiser steps of about one epoch."""
        return -(-len(self._batches) // self.accumulate)

    def batch(self, step: int, micro: int) -> Batch:
        """Return the pairs of a micro-batch of step 1, 2, …."""
        epoch, place = divmod((step - 1) * self.accumulate + micro, len(self._batches))
        if epoch != self._epoch:
            self._begin(epoch)
        return self.train.batch(self._rows[list(self._batches[self._order[place]])].tolist())

    def held_out(self) -> Iterator[Batch]:
        """Yield the validation pairs, shortest first."""
        for rows in by_length([len(ids) for ids in self.validation.target], self.held_out_tokens):
            yield self.validation.batch(rows)

    def _begin(self, epoch: int) -> None:
        rng = self.rng.child("epoch", epoch)
        noise = _NOISE * rng.child("rows").uniform(len(self.train)).numpy()
        self._rows = np.lexsort((self._source + noise, self._target))
        self._order = rng.child("batches").permutation(len(self._batches)).tolist()
        self._epoch = epoch
