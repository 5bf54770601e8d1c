"""Graphs over frames: an automaton of labels behind a topology that says how frames spell labels.

    score(π) = Σ_t x_t(symbol of π_t) + initial(π_1) + Σ_t weight(π_{t−1}, π_t) + final(π_T),   π = one state per frame

CTC topology  symbols 0 (blank), 1 … V: repeats are merged, then blanks dropped. State (h, s): history h, last symbol s.
              (h, s) → (h, blank) and (h, v) → (h, v) weigh 0;  (h, s) → (next(h, v), v) for v ≠ s weighs log p(v | h)
HMM topology  N symbols per label, run through from left to right with self-loops and no blank: LF-MMI.

A state owns the symbol of its frames; an arc outputs a label or nothing (0). The two states (h, blank) and (h, v) send
the same arcs but for a repeated v, so sums read them through a junction that adds the two: half the arcs, the same
numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, final

import numpy as np
from jaxtyping import Float64, Int64

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write
from freenergy.structured.label_automaton import LabelAutomaton

Topology = Literal["ctc", "hmm"]
Arc = tuple[int, int, int, float]  # source, target, label, log-weight


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LabelGraph:
    """All states and arcs of automaton and topology. ``join`` is the junction of each state, −1 for none.

    >>> graph = LabelGraph.ctc(LabelAutomaton.free(2))
    >>> graph.num_states, len(graph.source), graph.num_symbols
    (3, 9, 3)
    """

    automaton: LabelAutomaton
    topology: Topology
    states_per_label: int
    symbol: Int64[np.ndarray, " S"]
    source: Int64[np.ndarray, " A"]
    target: Int64[np.ndarray, " A"]
    label: Int64[np.ndarray, " A"]
    log_weight: Float64[np.ndarray, " A"]
    initial: Float64[np.ndarray, " S"]
    final: Float64[np.ndarray, " S"]
    first_label: Int64[np.ndarray, " S"]  # what a path that begins in a state has output
    join: Int64[np.ndarray, " S"]

    @property
    def num_states(self) -> int:
        """Return S."""
        return len(self.symbol)

    @property
    def num_labels(self) -> int:
        """Return V."""
        return self.automaton.num_labels

    @property
    def num_symbols(self) -> int:
        """Return C, the number of symbols that a frame can have."""
        return self.num_labels + 1 if self.topology == "ctc" else self.num_labels * self.states_per_label

    @classmethod
    def ctc(cls, automaton: LabelAutomaton) -> "LabelGraph":
        """Return CTC ∘ automaton: the denominator graph of CTC-CRF."""
        return _ctc(automaton.trimmed())

    @classmethod
    def hmm(cls, automaton: LabelAutomaton, states_per_label: int = 2) -> "LabelGraph":
        """Return HMM ∘ automaton: the denominator graph of LF-MMI."""
        if states_per_label < 1:
            raise UserError(f"a label has {states_per_label} states: give it 1 or more")
        return _hmm(automaton.trimmed(), states_per_label)

    def num_frames(self, labels: Sequence[int]) -> int:
        """Return how many frames a label sequence needs at least."""
        if self.topology == "hmm":
            return self.states_per_label * len(labels)
        return len(labels) + sum(a == b for a, b in pairwise(labels))

    def band(self, labels: Sequence[int]) -> tuple[list[int], list[bool], int]:
        """Return the chain of symbols that spells y, which of them can be entered over one, and how many begin it."""
        if self.topology == "hmm":
            N = self.states_per_label
            symbols = [(v - 1) * N + i for v in labels for i in range(N)]
            return symbols, [False] * len(symbols), min(1, len(symbols))
        symbols, skip = [0], [False]
        for i, v in enumerate(labels):
            symbols += [v, 0]
            skip += [i > 0 and labels[i - 1] != v, False]
        return symbols, skip, min(2, len(symbols))

    def write_openfst(self, path: Path) -> None:
        """Write OpenFst's text: source, target, symbol + 1, label, cost = −log-weight; 0 is ε; state 0 starts."""
        lines = [
            f"0 {s + 1} {self.symbol[s] + 1} {self.first_label[s]} {_cost(self.initial[s])}"
            for s in np.nonzero(self.initial > -np.inf)[0]
        ]
        lines += [
            f"{a + 1} {b + 1} {self.symbol[b] + 1} {v} {_cost(w)}"
            for a, b, v, w in zip(self.source, self.target, self.label, self.log_weight, strict=True)
        ]
        lines += [f"{s + 1} {_cost(self.final[s])}" for s in np.nonzero(self.final > -np.inf)[0]]
        with atomic_write(path) as aside:
            aside.write_text("\n".join(lines) + "\n")


def _cost(log_weight: float) -> str:
    return repr(-float(log_weight) + 0.0)


def _graph(
    automaton: LabelAutomaton, topology: Topology, N: int, states: list[tuple[int, int]], arcs: list[Arc],
    starts: list[Arc], final: list[float], join: list[int],
) -> LabelGraph:  # fmt: skip
    if not any(end > -np.inf for end in final):
        raise UserError("the automaton allows no label sequence: check its ends and its weights")
    columns = [np.array(column) for column in zip(*arcs, strict=True)] if arcs else [np.zeros(0)] * 4
    source, target, label = (column.astype(np.int64) for column in columns[:3])
    initial, first = np.full(len(states), -np.inf), np.zeros(len(states), dtype=np.int64)
    for _, state, v, weight in starts:
        initial[state], first[state] = weight, v
    return LabelGraph(
        automaton, topology, N, np.array([symbol for _, symbol in states]), source, target, label,
        columns[3].astype(np.float64), initial, np.array(final), first, np.array(join),
    )  # fmt: skip


def _ctc(automaton: LabelAutomaton) -> LabelGraph:
    states, number = _ctc_states(automaton)
    into: dict[int, list[int]] = {}
    for h, s in states:
        into.setdefault(h, []).append(s)
    arcs: list[Arc] = []
    for (h, s), i in number.items():
        arcs.append((i, number[h, 0], 0, 0.0))
        if s:
            arcs.append((i, i, 0, 0.0))
    starts = [(-1, number[0, 0], 0, 0.0)]
    for h, v, after, weight in automaton.arcs():
        if h == 0:
            starts.append((-1, number[after, v], v, weight))
        arcs += [(number[h, s], number[after, v], v, weight) for s in into.get(h, ()) if s != v]
    pairs = [h for h, symbols in into.items() if len(symbols) == 2]  # with one label before, and its blank
    join = [pairs.index(h) if len(into[h]) == 2 else -1 for h, _ in states]
    return _graph(automaton, "ctc", 1, states, arcs, starts, [float(automaton.log_end[h]) for h, _ in states], join)


def _ctc_states(automaton: LabelAutomaton) -> tuple[list[tuple[int, int]], dict[tuple[int, int], int]]:
    """Return the states (h, last symbol) that a path can reach, and their numbers."""
    reached, successors = [0], dict[int, list[tuple[int, int]]]()
    for h, v, after, _ in automaton.arcs():
        successors.setdefault(h, []).append((after, v))
    known = {0}
    for h in reached:  # grows while it is read
        for after, _ in successors.get(h, ()):
            if after not in known:
                known.add(after)
                reached.append(after)
    states = {(h, 0) for h in reached} | {pair for h in reached for pair in successors.get(h, ())}
    ordered = sorted(states)
    return ordered, {state: i for i, state in enumerate(ordered)}


def _hmm(automaton: LabelAutomaton, N: int) -> LabelGraph:
    entered, _ = _ctc_states(automaton)
    entered = [(h, v) for h, v in entered if v]
    number = {(h, v, i): n * N + i for n, (h, v) in enumerate(entered) for i in range(N)}
    states = [(h, (v - 1) * N + i) for h, v, i in number]
    arcs: list[Arc] = [(i, i, 0, 0.0) for i in number.values()]
    arcs += [(n * N + i, n * N + i + 1, 0, 0.0) for n in range(len(entered)) for i in range(N - 1)]
    into: dict[int, list[int]] = {}
    for h, v in entered:
        into.setdefault(h, []).append(number[h, v, N - 1])
    starts: list[Arc] = []
    for h, v, after, weight in automaton.arcs():
        if h == 0:
            starts.append((-1, number[after, v, 0], v, weight))
        arcs += [(last, number[after, v, 0], v, weight) for last in into.get(h, ())]
    final = [float(automaton.log_end[h]) if i == N - 1 else -np.inf for h, _, i in number]
    return _graph(automaton, "hmm", N, states, arcs, starts, final, [-1] * len(states))
