"""From potentials to label sequences: greedy, and prefix beam search with any scorers fused.

    score(y) = log Σ_{π spells y} exp Σ_t x_t(π_t)  +  Σ_k weight_k · log p_k(y)  +  bonus · |y|

A prefix y has two sums over the frames so far: paths that end in a blank, and paths that end in its last label. Of each
frame the ``beam`` best prefixes are kept, so a beam that holds all of them is exhaustive search. What the search
returns carries the score over *all* paths, computed once more without a beam. To decode a CTC-CRF, fuse its own
automaton with weight 1: without it the search is not that of the trained law.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Sequences
from freenergy.structured.ctc import ctc_log_score, padded_labels
from freenergy.structured.label_automaton import LabelAutomaton

INF = math.inf


@runtime_checkable
class LabelScorer(Protocol):
    """A law of label sequences that is read label by label; states can be keys of a dictionary."""

    def start(self) -> Hashable:
        """Return the state before the first label."""

    def step(self, state: Any, label: int) -> tuple[Hashable, float]:
        """Return the state after a label, and the label's log-probability; −inf forbids it."""

    def end(self, state: Any) -> float:
        """Return the log-probability that the sequence ends here."""


@final
class AutomatonScorer:
    """The weights of an automaton: an n-gram of labels, or a lexicon."""

    def __init__(self, automaton: LabelAutomaton) -> None:
        self._next, self._weight, self._end = (
            each.tolist() for each in (automaton.next, automaton.log_weight, automaton.log_end)
        )

    def start(self) -> int:
        """Return the first history."""
        return 0

    def step(self, state: int, label: int) -> tuple[int, float]:
        """Follow an arc."""
        return self._next[state][label - 1], self._weight[state][label - 1]

    def end(self, state: int) -> float:
        """Return log p(end | history)."""
        return float(self._end[state])


@final
class LanguageModelScorer:
    """Any language model whose tokens are the labels: ``tokens[v]`` is the token of label v, ``tokens[0]`` is EOS."""

    def __init__(self, lm: LanguageModel, tokens: Sequence[int], prompt: Sequence[int] = ()) -> None:
        self._lm, self._tokens, self._prompt = lm, list(tokens), tuple(prompt)
        self._known: dict[tuple[int, ...], list[float]] = {}

    def start(self) -> tuple[int, ...]:
        """Return the prompt."""
        return self._prompt

    def step(self, state: tuple[int, ...], label: int) -> tuple[tuple[int, ...], float]:
        """Append the token of a label."""
        token = self._tokens[label]
        return (*state, token), self._log_probs(state)[token]

    def end(self, state: tuple[int, ...]) -> float:
        """Return log p(EOS | tokens)."""
        return self._log_probs(state)[self._tokens[0]]

    def _log_probs(self, state: tuple[int, ...]) -> list[float]:
        if state not in self._known:
            self._known[state] = self._lm.next_log_probs(Sequences.from_lists([list(state)]))[0].tolist()
        return self._known[state]


class Hypothesis(NamedTuple):
    """A label sequence with its score, and the parts: log-sum of the frames, and log p_k(y) of each scorer."""

    labels: tuple[int, ...]
    score: float
    log_frames: float
    log_scorers: tuple[float, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBeam:
    """Prefix beam search; ``weights`` belong to the scorers in their order, 1 where none are given."""

    beam: int = 16
    bonus: float = 0.0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, "beam", at_least=1)

    def __call__(
        self, potentials: Float[Tensor, "T C"], scorers: Sequence[LabelScorer] = (), k: int = 1
    ) -> list[Hypothesis]:
        """Return up to k label sequences of one utterance, best first; none where all are forbidden."""
        weights = self.weights or (1.0,) * len(scorers)
        if len(weights) != len(scorers):
            raise UserError(f"{len(scorers)} scorers have {len(weights)} weights: give one for each")
        if not 1 <= k <= self.beam:
            raise UserError(f"{k} label sequences are asked of a beam of {self.beam}: widen the beam")
        fused = _Fused(scorers, weights, self.bonus)
        prefixes = _search(potentials.detach().double().cpu().numpy(), fused, self.beam)
        ended = [(prefix, fused.total(prefix.labels)) for prefix in prefixes]
        return self._with_all_paths(potentials, [pair for pair in ended if pair[1].score > -INF], k)

    def _with_all_paths(self, potentials: Tensor, ended: "list[tuple[_Prefix, _Total]]", k: int) -> list[Hypothesis]:
        if not ended:
            return []
        x = potentials.detach().double().unsqueeze(0)
        y = padded_labels([prefix.labels for prefix, _ in ended])
        frames = ctc_log_score(x.expand(len(y), -1, -1), y.to(x.device)).tolist()
        found = [
            Hypothesis(prefix.labels, log_sum + total.score, log_sum, total.parts)
            for (prefix, total), log_sum in zip(ended, frames, strict=True)
        ]
        return sorted(found, key=lambda each: -each.score)[:k]


class _Total(NamedTuple):
    score: float
    parts: tuple[float, ...]


@final
class _Fused:
    """The weighted sum of scorers, and the bonus of each label."""

    def __init__(self, scorers: Sequence[LabelScorer], weights: Sequence[float], bonus: float) -> None:
        self.scorers, self.weights, self.bonus = scorers, weights, bonus

    def start(self) -> tuple[Any, ...]:
        return tuple(scorer.start() for scorer in self.scorers)

    def step(self, state: tuple[Any, ...], label: int) -> tuple[tuple[Any, ...], float]:
        states, total = [], self.bonus
        for scorer, weight, own in zip(self.scorers, self.weights, state, strict=True):
            after, log_p = scorer.step(own, label)
            if log_p == -INF:
                return state, -INF
            states.append(after)
            total += weight * log_p
        return tuple(states), total

    def total(self, labels: Sequence[int]) -> _Total:
        """Score a whole label sequence."""
        parts = []
        for scorer in self.scorers:
            state, own = scorer.start(), 0.0
            for v in labels:
                state, log_p = scorer.step(state, v)
                own += log_p
                if own == -INF:
                    return _Total(-INF, ())
            parts.append(own + scorer.end(state))
        if any(part == -INF for part in parts):
            return _Total(-INF, ())
        score = sum(w * part for w, part in zip(self.weights, parts, strict=True))
        return _Total(score + self.bonus * len(labels), tuple(parts))


@final
@dataclass(slots=True, eq=False)
class _Prefix:
    """Labels so far, the states and the score of the scorers, and the sums of paths that end in a blank or a label."""

    labels: tuple[int, ...]
    state: tuple[Any, ...]
    fused: float
    blank: float = -INF
    label: float = -INF

    @property
    def frames(self) -> float:
        return float(np.logaddexp(self.blank, self.label))


def _search(x: np.ndarray, fused: _Fused, beam: int) -> list[_Prefix]:
    kept = [_Prefix((), fused.start(), 0.0, blank=0.0)]
    steps: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], float]]] = {}
    for frame in x:
        kept = _advanced(kept, frame, fused, beam, steps)
    return kept


def _advanced(
    kept: list[_Prefix], frame: np.ndarray, fused: _Fused, beam: int,
    steps: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], float]]],
) -> list[_Prefix]:  # fmt: skip
    """Read one frame: every prefix stays or grows by a label; the best of all are kept."""
    C, number = len(frame), {prefix.labels: i for i, prefix in enumerate(kept)}
    for prefix in kept:
        if prefix.state not in steps:
            steps[prefix.state] = [fused.step(prefix.state, v) for v in range(1, C)]
    blank, label, own = (np.array([getattr(p, name) for p in kept]) for name in ("blank", "label", "fused"))
    last = np.array([p.labels[-1] if p.labels else 0 for p in kept])
    every = np.logaddexp(blank, label)
    arcs = np.array([[weight for _, weight in steps[p.state]] for p in kept])
    grown = np.repeat(every[:, None], C - 1, 1)
    rows = last.nonzero()[0]
    grown[rows, last[rows] - 1] = blank[rows]  # a repeated label needs a blank between
    grown = grown + frame[1:]
    stays_blank, stays_label = every + frame[0], np.where(last > 0, label + frame[last], -INF)
    for i, prefix in enumerate(kept):  # a prefix that another one grows into gets its paths too
        parent = number.get(prefix.labels[:-1]) if prefix.labels else None
        if parent is not None:
            v = prefix.labels[-1] - 1
            stays_label[i] = np.logaddexp(stays_label[i], grown[parent, v])
            grown[parent, v] = -INF
    stay = np.logaddexp(stays_blank, stays_label) + own
    with np.errstate(invalid="ignore"):
        scores = np.concatenate([stay, np.where(grown > -INF, grown + arcs + own[:, None], -INF).ravel()])
    best = np.argsort(-scores, kind="stable")[:beam]
    new = []
    for i in best[scores[best] > -INF]:
        if i < len(kept):
            old = kept[i]
            new.append(_Prefix(old.labels, old.state, old.fused, float(stays_blank[i]), float(stays_label[i])))
        else:
            parent, v = divmod(int(i) - len(kept), C - 1)
            old, (state, weight) = kept[parent], steps[kept[parent].state][v]
            new.append(_Prefix((*old.labels, v + 1), state, old.fused + weight, label=float(grown[parent, v])))
    return new


def greedy(potentials: Float[Tensor, "B T C"], lengths: Int[Tensor, " B"] | None = None) -> list[list[int]]:
    """Return the labels of the best symbol of each frame: repeats merged, blanks dropped. It reads no label law."""
    best = potentials.argmax(-1)
    rows = [row.tolist() for row in best]
    lengths_list = [len(row) for row in rows] if lengths is None else lengths.tolist()
    return [
        [c for c, before in zip(row[:n], [0, *row], strict=False) if c and c != before]
        for row, n in zip(rows, lengths_list, strict=True)
    ]
