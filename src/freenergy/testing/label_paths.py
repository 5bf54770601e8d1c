"""Every path of a tiny CTC or HMM graph, one by one: the brute-force sibling of ``structured.LabelPaths``.

    p(π) = exp( log p(y) + Σ_t x_t(π_t) ) / Z,      p(y) = Σ_{π spells y} p(π)

log p(y) is any function of a label sequence, so neither the graph nor the automaton is shared with the code under test.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

LabelSequence = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class EnumeratedPaths:
    """All paths: their symbols, what they spell, and their scores [P], differentiable in the potentials."""

    symbols: list[tuple[int, ...]]
    labels: list[LabelSequence]
    log_score: Float[Tensor, " P"]

    def log_partition(self) -> Tensor:
        """Return log Σ_π exp score(π)."""
        return self.log_score.logsumexp(0)

    def log_scores(self) -> dict[LabelSequence, Tensor]:
        """Return log Σ_{π spells y} exp score(π) of every y that can be spelt."""
        places: dict[LabelSequence, list[int]] = {}
        for i, y in enumerate(self.labels):
            places.setdefault(y, []).append(i)
        return {y: self.log_score[some].logsumexp(0) for y, some in places.items()}

    def log_probs(self) -> dict[LabelSequence, Tensor]:
        """Return log p(y)."""
        log_z = self.log_partition()
        return {y: score - log_z for y, score in self.log_scores().items()}


def collapsed(symbols: tuple[int, ...]) -> LabelSequence:
    """Merge repeats, then drop blanks.

    >>> collapsed((0, 3, 3, 0, 0, 1, 1, 0, 2, 0))
    (3, 1, 2)
    """
    return tuple(c for c, before in zip(symbols, (0, *symbols), strict=False) if c and c != before)


def enumerate_ctc(x: Float[Tensor, "T C"], log_p: Callable[[LabelSequence], float]) -> EnumeratedPaths:
    """Return all C^T paths of the CTC topology whose labels have a positive weight."""
    T, C = x.shape
    paths = [(path, collapsed(path)) for path in itertools.product(range(C), repeat=T)]
    return _enumerated(x, paths, log_p)


def enumerate_hmm(
    x: Float[Tensor, "T C"], states_per_label: int, log_p: Callable[[LabelSequence], float]
) -> EnumeratedPaths:
    """Return all paths of the HMM topology: label sequences with a duration of one frame or more for each state."""
    (T, C), N = x.shape, states_per_label
    paths = []
    for length in range(1, T // N + 1):
        cuts = list(itertools.combinations(range(1, T), length * N - 1))
        for y in itertools.product(range(1, C // N + 1), repeat=length):
            chain = [(v - 1) * N + i for v in y for i in range(N)]
            for cut in cuts:
                durations = [b - a for a, b in itertools.pairwise((0, *cut, T))]
                path = tuple(c for c, num in zip(chain, durations, strict=True) for _ in range(num))
                paths.append((path, y))
    return _enumerated(x, paths, log_p)


def _enumerated(
    x: Tensor, paths: list[tuple[tuple[int, ...], LabelSequence]], log_p: Callable[[LabelSequence], float]
) -> EnumeratedPaths:
    weights = {y: log_p(y) for _, y in paths}
    paths = [(path, y) for path, y in paths if weights[y] > -torch.inf]
    symbols = torch.tensor([path for path, _ in paths])
    own = x.gather(1, symbols.T).sum(0)  # of all paths at once
    score = own + torch.tensor([weights[y] for _, y in paths], dtype=x.dtype)
    return EnumeratedPaths([path for path, _ in paths], [y for _, y in paths], score)
