"""Draws of an interpolated n-gram model without forming V probabilities: a mixture, whose orders are walked down.

    p_k(w | h) = (1 − γ(h)) · d(w | h) + γ(h) · p_{k−1}(w | h′),        d(w | h) = direct(hw) / (1 − γ(h))

At order k a token is a child of h with probability 1 − γ(h), chosen by its discounted count; else the walk goes on one
order below, and below order 1 every token has probability 1/V. One uniform number u makes all these choices:

    u < 1 − γ(h):   the child whose cumulated direct mass exceeds u
    else:           u ← (u − 1 + γ(h)) / γ(h), one order below

So u ↦ w is piecewise constant, and the pieces of w have length p(w | h) in all, up to 2^−52 times the number of
contexts. The children of h lie side by side: one cumulative sum per order and one binary search find the child. A
token costs O(n log nodes) instead of O(V). The same nodes give log P_LM of what was drawn, and are the contexts of the
next token.

Legend: R strings, n order, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.ngram_counts import NONE, find
from freenergy.lm.stepping import in_chunks

if TYPE_CHECKING:
    from freenergy.lm.ngram import NgramTable

ROWS = 2**16  # strings drawn at once: what fits the processor's cache is faster than more


class NgramMixture(NamedTuple):
    """The tables of all orders, with the cumulated direct mass before each node."""

    tables: "Sequence[NgramTable]"
    before: list[Float64[np.ndarray, " nodes"]]
    vocab_size: int

    @classmethod
    def of(cls, tables: "Sequence[NgramTable]", vocab_size: int) -> "NgramMixture":
        """Cumulate the mass of every order once."""
        return cls(tables, [_before(table) for table in tables], vocab_size)

    def tokens(self, ends: Sequence[Int64[np.ndarray, " R"]], u: Float64[np.ndarray, " R"]) -> Int64[np.ndarray, " R"]:
        """Return the token of each string at u, given the nodes of its last 0 … n − 1 tokens."""
        token = np.full(len(u), NONE)
        open_rows, u = np.arange(len(u)), u.copy()
        for table, before, contexts in list(zip(self.tables, self.before, ends, strict=True))[::-1]:
            context = contexts[open_rows]
            stay = np.where(context == NONE, 0.0, 1.0 - table.rest[context])
            leaves = u < stay
            token[open_rows[leaves]] = self._child(table, before, context[leaves], u[leaves])
            u = np.minimum((u[~leaves] - stay[~leaves]) / table.rest[context[~leaves]], np.nextafter(1, 0))
            open_rows = open_rows[~leaves]
        token[open_rows] = (u * self.vocab_size).astype(np.int64)
        return token

    def _child(
        self,
        table: "NgramTable",
        before: Float64[np.ndarray, " nodes"],
        context: Int64[np.ndarray, " r"],
        u: Float64[np.ndarray, " r"],
    ) -> Int64[np.ndarray, " r"]:
        """Return the last token of the child whose mass contains u; rounding never leaves the context."""
        low, high = table.first[context], table.first[context + 1] - 1
        node = np.searchsorted(before, context + u / 2, side="right") - 1
        return np.asarray(table.keys[np.clip(node, low, high)] % self.vocab_size)

    def read(
        self, ends: Sequence[Int64[np.ndarray, " R"]], tokens: Int64[np.ndarray, " R"]
    ) -> tuple[list[Int64[np.ndarray, " R"]], Float64[np.ndarray, " R"]]:
        """Append a token to each string: return the nodes of its last 0 … n − 1 tokens, and P_LM of the token."""
        p = np.full(len(tokens), 1 / self.vocab_size)
        after = [np.zeros_like(tokens)]
        for table, context in zip(self.tables, ends, strict=True):
            node = find(table.keys, np.where(context == NONE, NONE, context * self.vocab_size + tokens))
            p *= table.rest[context]
            p += table.direct[node]
            after.append(node)
        return after[:-1], p


def _before(table: "NgramTable") -> Float64[np.ndarray, " nodes"]:
    """Return context + ½ · (direct mass of its earlier children): ascending over all nodes of the order."""
    total = np.concatenate([[0.0], np.cumsum(table.direct[:-1])])
    context = np.repeat(np.arange(len(table.first) - 1), np.diff(table.first))
    inside = total[:-1] - total[table.first[context]]
    return np.asarray(context + inside.clip(min=0) / 2)


def draw_mixture(
    mixture: NgramMixture,
    ends: Sequence[Int64[np.ndarray, " B"]],
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
) -> Draws:
    """Draw ``num`` continuations of each context, given the nodes of its last 0 … n − 1 tokens."""

    def read(some: slice) -> Callable[[int], Sequence[Int64[np.ndarray, " B"]]]:
        return lambda count: [end[some] for end in ends]

    def draw(
        own: Sequence[np.ndarray], some: Sequences, k: int, space: SequenceSpace, rng: Rng, _: Truncation
    ) -> Draws:
        return _drawn(mixture, own, some, k, space, rng)

    return in_chunks(read, contexts, num, space, rng, ANCESTRAL, rows=ROWS, draw=draw)


def _drawn(
    mixture: NgramMixture,
    ends: Sequence[Int64[np.ndarray, " B"]],
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
) -> Draws:
    B, device = len(contexts), contexts.tokens.device
    running, nodes, rows = np.arange(B * num), [np.repeat(end, num) for end in ends], rng.rows(B, num, space.length)
    tokens, log_p = np.zeros((B * num, space.length), dtype=np.int64), np.zeros(B * num)
    for t in range(space.length):
        chosen = mixture.tokens(nodes, rows.uniform(t).reshape(-1).numpy()[running])
        nodes, p = mixture.read(nodes, chosen)
        tokens[running, t] = chosen
        log_p[running] += np.log(p)
        if space.eos is not None:
            is_open = chosen != space.eos
            running, nodes = running[is_open], [node[is_open] for node in nodes]
            if not len(running):
                break
    shaped = torch.from_numpy(tokens.reshape(B, num, space.length)).to(device)
    log_base = torch.from_numpy(log_p.reshape(B, num)).to(device)
    return Draws(Continuations(contexts, shaped, space.lengths(shaped)), log_base, log_base)
