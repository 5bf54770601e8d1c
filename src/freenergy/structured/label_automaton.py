"""Deterministic automata of labels: what a label sequence weighs, and which ones exist.

    log p(y) = Σ_i log_weight(h_{i−1}, y_i) + log_end(h_U),        h_0 = 0,   h_i = next(h_{i−1}, y_i)

A state h is a history. Labels run from 1 to V (0 is the blank of frames and never a label). With one path per label
sequence and every successor written out there are no ε arcs, so a sum over paths counts each sequence once: a backoff
arc in a sum would count it twice. A label that may not follow has no next state and the weight −inf.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float64, Int64

from freenergy.core.errors import UserError
from freenergy.core.sequences import Sequences
from freenergy.lm.ngram import NgramLM
from freenergy.lm.ngram_counts import NONE

_MOST_STATES = 200_000


@final
@dataclass(frozen=True, slots=True, eq=False)
class LabelAutomaton:
    """The states 0 … H − 1, of which 0 is the start; entry v − 1 of a row is about label v.

    >>> LabelAutomaton.free(2).log_score([1, 1, 2])
    0.0
    """

    next: Int64[np.ndarray, "H V"]
    log_weight: Float64[np.ndarray, "H V"]
    log_end: Float64[np.ndarray, " H"]

    def __post_init__(self) -> None:
        if self.next.shape != self.log_weight.shape or len(self.log_end) != len(self.next) or not self.next.size:
            raise UserError(
                f"an automaton has next states {self.next.shape}, weights {self.log_weight.shape} and ends "
                f"{self.log_end.shape}: give [histories, labels] twice and [histories]"
            )
        if np.isnan(self.log_weight).any() or (self.log_weight == np.inf).any() or not (self.log_end < np.inf).all():
            raise UserError("a weight of the automaton is NaN or +inf: give log-weights below +inf")
        if (self.next >= len(self.next)).any():
            raise UserError(f"an arc leads to state {self.next.max()}: the automaton has {len(self.next)} states")

    @property
    def num_labels(self) -> int:
        """Return V."""
        return int(self.next.shape[1])

    @classmethod
    def free(cls, num_labels: int) -> "LabelAutomaton":
        """Return the automaton in which every label sequence has weight 1: with it CTC-CRF is CTC."""
        return cls(np.zeros((1, num_labels), dtype=np.int64), np.zeros((1, num_labels)), np.zeros(1))

    @classmethod
    def from_ngram(cls, lm: NgramLM) -> "LabelAutomaton":
        """Write out an n-gram model whose token v is label v and whose EOS is token 0, the blank's number.

        A history is the longest suffix that was counted; a longer one has the same successors.
        """
        if lm.eos != 0:
            raise UserError(f"EOS of the label model is token {lm.eos}: count label sequences that end with 0")
        histories: list[tuple[int, ...]] = [(0,)]
        number: dict[tuple[int, ...], int] = {(0,): 0}
        tables = []
        for history in histories:  # grows while it is read
            log_p = lm.next_log_probs(Sequences.from_lists([list(history)]))[0].numpy()
            row = []
            for v in range(1, lm.vocab_size):
                after = _counted(lm, (*history, v))
                if after not in number:
                    number[after] = len(histories)
                    histories.append(after)
                row.append(number[after])
            if len(histories) > _MOST_STATES:
                raise UserError(f"the label model has over {_MOST_STATES} histories: lower its order")
            tables.append((row, log_p))
        log_p = np.stack([each for _, each in tables])
        return cls(np.array([row for row, _ in tables], dtype=np.int64), log_p[:, 1:].copy(), log_p[:, 0].copy())

    @classmethod
    def from_lexicon(
        cls, words: Sequence[Sequence[int]], num_labels: int, *, separator: int | None = None
    ) -> "LabelAutomaton":
        """Return the sequences of one or more words, each of weight 1; between two words stands the separator.

        Without a separator no word may begin another one, since it would not be known where a word ends.
        """
        tree: dict[tuple[int, ...], int] = {(): 0}
        for word in words:
            _check_word(word, num_labels, separator)
            for length in range(1, len(word) + 1):
                tree.setdefault(tuple(word[:length]), len(tree))
        ends = {tuple(word) for word in words}
        table = np.full((len(tree), num_labels), NONE, dtype=np.int64)
        for prefix, node in tree.items():
            if prefix:
                table[tree[prefix[:-1]], prefix[-1] - 1] = node
        for word in ends:
            node = tree[word]
            if separator is not None:
                table[node, separator - 1] = 0
            elif (table[node] != NONE).any():
                raise UserError(f"the word {list(word)} begins another word: give the lexicon a separator")
        if separator is None:
            for word in ends:
                table[tree[word]] = table[0]
        log_end = np.full(len(tree), -np.inf)
        log_end[[tree[word] for word in ends]] = 0.0
        return cls(table, np.where(table == NONE, -np.inf, 0.0), log_end)

    def log_score(self, labels: Sequence[int]) -> float:
        """Return log p(y); −inf where the automaton forbids y."""
        h, total = 0, 0.0
        for v in labels:
            if not 1 <= v <= self.num_labels:
                raise UserError(f"label {v} is not in the alphabet: labels run from 1 to {self.num_labels}")
            total += float(self.log_weight[h, v - 1])
            h = int(self.next[h, v - 1])
            if h == NONE or total == -math.inf:
                return -math.inf
        return total + float(self.log_end[h])

    def scaled(self, weight: float) -> "LabelAutomaton":
        """Return the automaton with all log-weights multiplied, which is no law any more."""
        weights, ends = (
            np.where(w == -np.inf, w, weight * np.maximum(w, -1e300)) for w in (self.log_weight, self.log_end)
        )
        return LabelAutomaton(self.next, weights, ends)

    def trimmed(self) -> "LabelAutomaton":
        """Return the automaton without arcs into states from which no end can be reached."""
        alive = self.log_end > -np.inf
        while True:
            leads = (self.next != NONE) & (self.log_weight > -np.inf) & alive[self.next]
            now = alive | leads.any(1)
            if (now == alive).all():
                return LabelAutomaton(
                    np.where(leads, self.next, NONE), np.where(leads, self.log_weight, -np.inf), self.log_end
                )
            alive = now

    def arcs(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield source, label, target and log-weight of every arc."""
        for h, v in zip(*np.nonzero((self.next != NONE) & (self.log_weight > -np.inf)), strict=True):
            yield int(h), int(v) + 1, int(self.next[h, v]), float(self.log_weight[h, v])


def _counted(lm: NgramLM, history: tuple[int, ...]) -> tuple[int, ...]:
    """Return the longest suffix of at most n − 1 tokens that was counted, of at least one token."""
    if lm.order == 1:
        return (0,)
    history = history[-(lm.order - 1) :]
    while len(history) > 1 and lm.ends(Sequences.from_lists([list(history)]))[len(history) - 1][0] == NONE:
        history = history[1:]
    return history


def _check_word(word: Sequence[int], num_labels: int, separator: int | None) -> None:
    if not word:
        raise UserError("a word of the lexicon has no labels: remove it")
    strange = [v for v in word if not 1 <= v <= num_labels or v == separator]
    if strange:
        raise UserError(f"label {strange[0]} of the word {list(word)} cannot be in a word of {num_labels} labels")
