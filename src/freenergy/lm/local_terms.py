"""The terms of a local mix, where they are not zero.

    order k = 2 … n           g_k(hv)                                     for each v seen after the last k − 1 tokens
    cache                     [c(v) > 0] and log(1 + c(v)), also · idf(v)    for each v in what was read, c(v) times
    copy                      [v followed the last token before], also · idf(v), [… the last two tokens]

of tokens v, given all that was read, h. They are sparse: a few thousand of the vocabulary have one, most of them by
the order 2. A state holds what B × N candidates have read; it moves on by one token of each at a time.

Legend: R rows, T tokens of each, with −1 before a shorter context begins.
"""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from freenergy.core.sequences import Sequences
from freenergy.lm.local_counts import LocalCounts

CACHE = ("in the context", "in the context · idf", "log(1 + count)", "log(1 + count) · idf")
COPY = ("followed the last token", "followed the last token · idf", "followed the last two tokens")
_NONE = -1


def order_name(k: int) -> str:
    """Return the name of the term of order k."""
    return f"order {k}"


class Cells(NamedTuple):
    """Numbers to add to the scores of some tokens of some rows; a cell may be there several times."""

    row: Int64[np.ndarray, " m"]
    token: Int64[np.ndarray, " m"]
    value: np.ndarray


@final
class LocalState:
    """What B × N candidates have read: their tokens, how often each was there before, and where the n-grams stand."""

    def __init__(self, counts: LocalCounts, contexts: Sequences, length: int) -> None:
        B, P = contexts.tokens.shape
        lengths = contexts.lengths.cpu().numpy()[:, None]
        place = np.arange(P) - (P - lengths)
        tokens = np.take_along_axis(contexts.tokens.cpu().numpy(), np.maximum(place, 0), axis=1)
        self._counts, self.filled = counts, P
        self.tokens = np.full((B, P + length), _NONE, dtype=np.int64)
        self.tokens[:, :P] = np.where(place < 0, _NONE, tokens)
        self.times = np.zeros((B, P + length), dtype=np.int64)  # 1 where a token stands for the first time
        self.times[:, :P] = _times(self.tokens[:, :P])
        self.nodes = counts.ngrams.ends(contexts)  # of the last 1 … n − 1 tokens, or −1

    def advance(self, tokens: Int[Tensor, "B N"]) -> None:
        """Read a token of each candidate."""
        new = tokens.reshape(-1).cpu().numpy()
        if len(new) != len(self.tokens):
            self._take(np.repeat(np.arange(len(tokens)), tokens.shape[1]))
        self.times[:, self.filled] = 1 + (self.tokens[:, : self.filled] == new[:, None]).sum(1)
        self.tokens[:, self.filled] = new
        self.filled += 1
        self.nodes = self._counts.ngrams.ends_after(self.nodes, new)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n] of that context."""
        B, N = rows.shape
        if len(self.tokens) == B * N:
            self._take((rows.cpu().numpy() + N * np.arange(B)[:, None]).ravel())

    def _take(self, rows: Int64[np.ndarray, " R"]) -> None:
        self.tokens, self.times = self.tokens[rows], self.times[rows]
        self.nodes = [nodes[rows] for nodes in self.nodes]


def _times(tokens: Int64[np.ndarray, "R T"]) -> Int64[np.ndarray, "R T"]:
    """Return how often the token at each place has stood in its row, up to and with that place."""
    order = np.argsort(tokens, axis=1, kind="stable")
    ranked = np.take_along_axis(tokens, order, axis=1)
    place = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    is_first = np.concatenate([np.ones((len(tokens), 1), dtype=bool), ranked[:, 1:] != ranked[:, :-1]], axis=1)
    start = np.maximum.accumulate(np.where(is_first, place, 0), axis=1)
    times = np.empty_like(tokens)
    np.put_along_axis(times, order, place - start + 1, axis=1)
    return times


@final
class LocalTerms:
    """The sparse terms with their weights, by name; a term without a weight is left out."""

    def __init__(self, counts: LocalCounts, weights: Mapping[str, float]) -> None:
        idf = counts.idf
        known, known_idf, log, log_idf = (weights.get(name, 0.0) for name in CACHE)
        after, after_idf, self._after_two = (weights.get(name, 0.0) for name in COPY)
        self._orders = [(gains, weights.get(order_name(k), 0.0)) for k, gains in enumerate(counts.gains, 2)]
        self._first, self._again = known + known_idf * idf, log + log_idf * idf
        self._after = after + after_idf * idf
        self._has_cache, self._has_copy = any(map(weights.get, CACHE)), any(map(weights.get, COPY))

    def cells(self, state: LocalState, rows: slice) -> Cells:
        """Compute all terms of some rows, numbered from 0."""
        parts = [self._of_order(k, state, rows) for k, (_, w) in enumerate(self._orders) if w]
        if self._has_cache:
            parts.append(self._cache(state, rows))
        if self._has_copy:
            parts += self._copy(state, rows)
        if not parts:
            return Cells(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
        return Cells(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _of_order(self, k: int, state: LocalState, rows: slice) -> Cells:
        gains, w = self._orders[k]
        row, node = gains.table.children(state.nodes[k][rows])
        return Cells(row, gains.tokens[node], w * gains.gain[node])

    def _cache(self, state: LocalState, rows: slice) -> Cells:
        """Add, at the i-th place of a token, what its i-th time adds to the terms of its count."""
        tokens, times = state.tokens[rows, : state.filled], state.times[rows, : state.filled]
        row, place = np.nonzero(tokens != _NONE)
        token, i = tokens[row, place], times[row, place]
        return Cells(row, token, self._first[token] * (i == 1) + self._again[token] * np.log1p(1 / i))

    def _copy(self, state: LocalState, rows: slice) -> list[Cells]:
        """Find the places before where the last token stood, and what followed; each follower counts once."""
        tokens = state.tokens[rows, : state.filled]
        row, place = np.nonzero(tokens[:, :-1] == tokens[:, -1:])
        found = [_followers(tokens, row, place, self._after)]
        if self._after_two and tokens.shape[1] > 1:
            is_two = (place > 0) & (tokens[row, place - 1] == tokens[row, -2]) & (tokens[row, -2] != _NONE)
            found.append(_followers(tokens, row[is_two], place[is_two], np.full_like(self._after, self._after_two)))
        return found


def _followers(tokens: Int64[np.ndarray, "R T"], row: np.ndarray, place: np.ndarray, values: np.ndarray) -> Cells:
    width = len(values)
    row, token = np.divmod(np.unique(row * width + tokens[row, place + 1]), width)
    return Cells(row, token, values[token])


def local_names(*, order: int, cache: bool, copy: bool) -> list[str]:
    """Return the names of the sparse terms of a mix."""
    orders = [order_name(k) for k in range(2, order + 1)]
    return orders + list(CACHE if cache else ()) + list(COPY if copy else ())


def add_cells(scores: Float[Tensor, "R W"], cells: Cells) -> None:
    """Add cells to scores, in place and in the order of the cells."""
    at = torch.from_numpy(cells.row * scores.shape[1] + cells.token).to(scores.device)
    scores.view(-1).index_add_(0, at, torch.from_numpy(cells.value).to(scores))
