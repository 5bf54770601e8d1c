"""Every labelling of a tiny structure, one by one: the brute-force sibling of each exact distribution.

    Z = Σ_y exp(score(y)),      p(y) = exp(score(y)) / Z,      all other numbers are sums over the same list

Scores are added up in plain Python from the potentials that the caller gives, so nothing is shared with the code under
test.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.structured import INSIDE, Allowed
from freenergy.structured.distribution import NO_LABEL


@final
@dataclass(frozen=True, slots=True)
class Enumerated:
    """All labellings of one row [Y, T], NO_LABEL where masked, and their scores [Y]; forbidden ones have −inf."""

    labels: Int[Tensor, "Y T"]
    log_score: Float[Tensor, " Y"]

    def log_partition(self) -> Float[Tensor, ""]:
        """Return log Σ_y exp(score(y))."""
        return self.log_score[self.log_score > -torch.inf].logsumexp(0)

    def probs(self) -> Float[Tensor, " Y"]:
        """Return p(y)."""
        return (self.log_score - self.log_partition()).exp()

    def marginals(self, num_labels: int) -> Float[Tensor, "T K"]:
        """Return p(y_t = k), 0 at masked positions."""
        is_label = self.labels.unsqueeze(-1) == torch.arange(num_labels)
        return (self.probs().view(-1, 1, 1) * is_label).sum(0)

    def pair_marginals(self, num_labels: int) -> Float[Tensor, "T1 K K"]:
        """Return p(y_s = j, y_t = k) at t − 1, s being the kept position before t."""
        T, kept = self.labels.shape[1], (self.labels[0] != NO_LABEL).nonzero().flatten().tolist()
        found = torch.zeros(T - 1, num_labels, num_labels, dtype=torch.float64)
        for y, p in zip(self.labels.tolist(), self.probs().tolist(), strict=True):
            for s, t in itertools.pairwise(kept):
                found[t - 1, y[s], y[t]] += p
        return found

    def expectation(self, f: Callable[[list[int]], float]) -> float:
        """Return E[f(y)] for any function of a labelling."""
        probs = self.probs().tolist()
        return float(sum(p * f(y) for y, p in zip(self.labels.tolist(), probs, strict=True) if p > 0))

    def entropy(self) -> float:
        """Return −Σ p log p."""
        return float(-torch.special.xlogy(self.probs(), self.probs()).sum())

    def best(self, k: int) -> "Enumerated":
        """Return the k best labellings, best first."""
        order = self.log_score.argsort(descending=True, stable=True)[:k]
        return Enumerated(self.labels[order], self.log_score[order])


def enumerate_chain(
    emissions: Float[Tensor, "T K"],
    transitions: Float[Tensor, "*steps K K"],
    *,
    start: Float[Tensor, " K"] | None = None,
    end: Float[Tensor, " K"] | None = None,
    mask: list[bool] | None = None,
    allowed: Allowed | None = None,
    row: int = 0,
) -> Enumerated:
    """Return every tagging of one chain; ``row`` is its place in the batch that ``allowed`` is about."""
    T, K = emissions.shape
    allowed = allowed or Allowed()
    kept = [t for t in range(T) if mask is None or mask[t]]
    taggings, scores = [], []
    for labels in itertools.product(range(K), repeat=len(kept)):
        score, is_allowed = emissions.new_zeros((), dtype=torch.float64), True
        for i, (t, k) in enumerate(zip(kept, labels, strict=True)):
            score = score + emissions[t, k]
            is_allowed &= allowed.labels is None or bool(allowed.labels[row, t, k])
            if i == 0 and start is not None:
                score = score + start[k]
            if i == len(kept) - 1 and end is not None:
                score = score + end[k]
            is_allowed &= i > 0 or allowed.start is None or bool(allowed.start[k])
            is_allowed &= i < len(kept) - 1 or allowed.end is None or bool(allowed.end[k])
            if i > 0:
                score = score + _at(transitions, row, t)[labels[i - 1], k]
                is_allowed &= allowed.pairs is None or bool(_at(allowed.pairs, row, t)[labels[i - 1], k])
        y = [NO_LABEL] * T
        for t, k in zip(kept, labels, strict=True):
            y[t] = k
        taggings.append(y)
        scores.append(score if is_allowed else torch.full_like(score, -torch.inf))
    return Enumerated(torch.tensor(taggings).view(-1, T), torch.stack(scores))


def enumerate_higher_order(
    emissions: Float[Tensor, "T K"],
    transitions: Tensor,
    *,
    end: Float[Tensor, " K"] | None = None,
    mask: list[bool] | None = None,
    allowed: Allowed | None = None,
    row: int = 0,
) -> Enumerated:
    """Return every tagging of one chain of order n; see ``HigherOrderChain``."""
    (T, K), n = emissions.shape, transitions.dim() - 1
    kept = [t for t in range(T) if mask is None or mask[t]]
    free = enumerate_chain(emissions, emissions.new_zeros(K, K), end=end, mask=mask, allowed=allowed, row=row)
    scores = []
    for y, score in zip(free.labels.tolist(), free.log_score, strict=True):
        path = [*[K] * n, *(y[t] for t in kept)]
        for i in range(len(kept)):
            score = score + transitions[tuple(path[i : i + n + 1])]
        scores.append(score)
    return Enumerated(free.labels, torch.stack(scores))


def enumerate_segments(
    segments: Float[Tensor, "T D K"],
    transitions: Float[Tensor, "K K"],
    *,
    start: Float[Tensor, " K"] | None = None,
    end: Float[Tensor, " K"] | None = None,
    length: int | None = None,
    allowed: Allowed | None = None,
) -> Enumerated:
    """Return every segmentation of the first ``length`` positions; see ``SegmentChain``."""
    T, D, K = segments.shape
    length, allowed = T if length is None else length, allowed or Allowed()
    labellings, scores = [], []
    for durations in _compositions(length, D):
        begins = [sum(durations[:i]) for i in range(len(durations))]
        for labels in itertools.product(range(K), repeat=len(durations)):
            score, is_allowed = segments.new_zeros((), dtype=torch.float64), True
            for i, (s, d, k) in enumerate(zip(begins, durations, labels, strict=True)):
                score = score + segments[s, d - 1, k]
                if i:
                    score = score + transitions[labels[i - 1], k]
                    is_allowed &= allowed.pairs is None or bool(allowed.pairs[labels[i - 1], k])
                else:
                    score = score if start is None else score + start[k]
                    is_allowed &= allowed.start is None or bool(allowed.start[k])
            if labels:
                score = score if end is None else score + end[labels[-1]]
                is_allowed &= allowed.end is None or bool(allowed.end[labels[-1]])
            labellings.append([NO_LABEL if t >= length else INSIDE for t in range(T)])
            for s, k in zip(begins, labels, strict=True):
                labellings[-1][s] = k
            scores.append(score if is_allowed else torch.full_like(score, -torch.inf))
    return Enumerated(torch.tensor(labellings).view(-1, T), torch.stack(scores))


def _compositions(total: int, longest: int) -> list[tuple[int, ...]]:
    """Return all ways to cut ``total`` positions into segments."""
    if total == 0:
        return [()]
    sizes = range(1, min(longest, total) + 1)
    return [(size, *rest) for size in sizes for rest in _compositions(total - size, longest)]


def _at(steps: Tensor, row: int, t: int) -> Tensor:
    """Return the matrix of the step into position t of a row."""
    return steps if steps.dim() == 2 else steps[t - 1] if steps.dim() == 3 else steps[row, t - 1]
