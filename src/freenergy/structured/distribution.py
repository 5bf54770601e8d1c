"""The role of an exact distribution over labellings, and what follows from its sums alone.

    H(p) = log Z_p − E_p[score_p],      H(p, q) = log Z_q − E_p[score_q],      KL(p ‖ q) = H(p, q) − H(p)
    E[Σ_t f_t(y_t) + Σ_t g_t(y_{t−1}, y_t)] = ⟨marginals, f⟩ + ⟨pair marginals, g⟩

A score may be −inf (a forbidden labelling); where p gives a labelling that q forbids a positive probability, H(p, q) is
+inf.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng

NO_LABEL = -1  # stands at positions that are masked out, and in rows that do not exist


@final
@dataclass(frozen=True, slots=True)
class Taggings:
    """Labellings with their scores: of ``argmax`` [B, T] and [B], of ``top_k`` [B, k, T] and [B, k].

    A labelling that does not exist (fewer than k are allowed, or none is) has the score −inf and no labels.
    """

    labels: Int[Tensor, "*rows T"]
    log_score: Float[Tensor, "*rows"]


@runtime_checkable
class StructuredDistribution(Protocol):
    """p(y) ∝ exp(log_score(y)) for a batch of B structures, with exact sums."""

    def log_partition(self) -> Float[Tensor, " B"]:
        """Return log Z = log Σ_y exp(log_score(y)); −inf where nothing is allowed."""

    def log_score(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return the unnormalised log-probability of given labellings."""

    def log_prob(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return log_score(y) − log Z."""

    def argmax(self) -> Taggings:
        """Return the best labelling of each row."""

    def top_k(self, k: int) -> Taggings:
        """Return the k best labellings of each row, best first."""

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draw independent labellings."""

    def expected_log_score(self, other: Any) -> Float[Tensor, " B"]:
        """Return E_{y ~ self}[other.log_score(y)]."""


@runtime_checkable
class PositionMarginals(Protocol):
    """A distribution that knows the label of each position, and of neighbours, by probability."""

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Return p(y_t = k)."""

    def pair_marginals(self) -> Float[Tensor, "B T1 K K"]:
        """Return p(y_s = j, y_t = k) at entry t − 1, s before t."""


def expectation(p: PositionMarginals, labels: Tensor | None, pairs: Tensor | None) -> Float[Tensor, " B"]:
    """Return E[Σ_t labels_t(y_t) + Σ_t pairs_t(y_s, y_t)]; 0 · (−inf) = 0."""
    if labels is None and pairs is None:
        raise UserError("the expectation of nothing is asked for: give labels, pairs or both")
    parts = []
    if labels is not None:
        parts.append(weighted(p.marginals(), labels).sum((1, 2)))
    if pairs is not None:
        parts.append(weighted(p.pair_marginals(), pairs).sum((1, 2, 3)))
    return torch.stack(parts).sum(0)


def posterior_argmax(marginals: Float[Tensor, "B T K"], kept: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the most probable label of each position, NO_LABEL where a position does not count."""
    return torch.where(kept, marginals.argmax(-1), NO_LABEL)


def weighted(probs: Tensor, values: Tensor) -> Tensor:
    """Return probs · values with 0 · (−inf) = 0."""
    return torch.where(probs > 0, probs * torch.where(probs > 0, values, 0.0), 0.0)


@runtime_checkable
class Conditionable(StructuredDistribution, Protocol):
    """A distribution that can be told which labels each position may have."""

    def condition(self, labels: Bool[Tensor, "B T K"]) -> "Conditionable":
        """Return the distribution given that every label is in its set."""


def entropy(p: StructuredDistribution) -> Float[Tensor, " B"]:
    """Return H(p) = log Z_p − E_p[score_p], in nats."""
    return p.log_partition() - p.expected_log_score(p)


def cross_entropy(p: StructuredDistribution, q: StructuredDistribution) -> Float[Tensor, " B"]:
    """Return H(p, q) = log Z_q − E_p[score_q]; +inf where q forbids what p allows."""
    if type(p) is not type(q):
        raise UserError(
            f"a {type(p).__name__} is compared with a {type(q).__name__}: two distributions of one kind can be compared"
        )
    return q.log_partition() - p.expected_log_score(q)


def kl(p: StructuredDistribution, q: StructuredDistribution) -> Float[Tensor, " B"]:
    """Return KL(p ‖ q) = H(p, q) − H(p)."""
    return cross_entropy(p, q) - entropy(p)


def log_partition_of_paths(p: StructuredDistribution, what: str, remedy: str) -> Float[Tensor, " B"]:
    """Return log Z, or refuse a row in which no labelling is allowed."""
    log_z = p.log_partition()
    closed = log_z.detach() == -math.inf
    if bool(closed.any()):
        raise UserError(f"no {what} of sequence {int(closed.int().argmax())} is allowed: {remedy}")
    return log_z


def partial_log_prob(p: Conditionable, labels: Bool[Tensor, "B T K"], what: str) -> Float[Tensor, " B"]:
    """Return log Σ p(y) over the labellings whose labels are all in their sets."""
    total = log_partition_of_paths(p, what, "loosen its constraints or correct its labels")
    return p.condition(labels).log_partition() - total
