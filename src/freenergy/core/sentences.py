"""Whole sentences side by side: what random fields read, of which a sentence has a length and an end.

tokens  w w w EOS w EOS …       bounds  0, 4, 6, …       length of a sentence = its words, EOS not counted
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, Integer

from freenergy.core.sequences import Continuations, Sequences


class Sentences(NamedTuple):
    """Sentences side by side, each with its EOS: sentence r is tokens[bounds[r] : bounds[r + 1]]."""

    tokens: Integer[np.ndarray, " T"]
    bounds: Int64[np.ndarray, " bounds"]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> "Sentences":
        """Join lists of token ids.

        >>> Sentences.from_lists([[5, 0], [0]]).bounds.tolist()
        [0, 2, 3]
        """
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(np.asarray(row, dtype=np.int64) for row in rows)])
        return cls(tokens, np.cumsum([0, *map(len, rows)]))

    @classmethod
    def padded(cls, tokens: Integer[np.ndarray, "R L"], lengths: Integer[np.ndarray, " R"]) -> "Sentences":
        """Join padded rows."""
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return cls(tokens[inside], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    @property
    def num(self) -> int:
        """How many sentences there are."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " R"]:
        """The number of words of each sentence, without EOS."""
        found: Int64[np.ndarray, " R"] = np.diff(self.bounds) - 1
        return found

    def take(self, first: int, last: int) -> "Sentences":
        """Return the sentences first … last − 1."""
        bounds = self.bounds[first : last + 1]
        return Sentences(self.tokens[bounds[0] : bounds[-1]], bounds - bounds[0])

    def blocks(self, places: int) -> Iterator["Sentences"]:
        """Yield runs of sentences with about the given number of places each."""
        first = 0
        while first < self.num:
            last = int(np.searchsorted(self.bounds, self.bounds[first] + places, side="right")) - 1
            last = min(max(last, first + 1), self.num)
            yield self.take(first, last)
            first = last

    def rows(self, where: np.ndarray) -> "Sentences":
        """Return some sentences by number or mask."""
        at = np.flatnonzero(where) if where.dtype == bool else where
        sizes = np.diff(self.bounds)[at]
        ends = np.cumsum(sizes)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
        return Sentences(self.tokens[place + np.repeat(self.bounds[at], sizes)], np.concatenate([[0], ends]))

    def lists(self) -> list[list[int]]:
        """Return the token ids of each sentence, EOS included."""
        return [part.tolist() for part in np.split(self.tokens, self.bounds[1:-1])] if self.num else []

    def continuations(self) -> Continuations:
        """Return all sentences as continuations [1, R] of the empty context."""
        sizes = np.diff(self.bounds)
        tokens = np.zeros((self.num, int(sizes.max(initial=0))), dtype=np.int64)
        tokens[np.arange(tokens.shape[1]) < sizes[:, None]] = self.tokens
        return Continuations(
            Sequences.from_lists([[]]), torch.from_numpy(tokens).unsqueeze(0), torch.from_numpy(sizes).unsqueeze(0)
        )
