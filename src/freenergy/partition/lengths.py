"""Normalisers and certificates of a random field, from one pool of draws of its base.

    w_i = e^{U(x_i)},  x_i ~ q,  i < n        Z ≈ (1/n) Σ_i w_i,        Z_l ≈ (1/n) Σ_{i: l_i = l} w_i

    global       log p ≥ log q(x) + log w(x) − log[(w(x) + Σ_i w_i) / n]
    by length    log p ≥ log q(x) + log π_l + log w(x) − log[(w(x) + Σ_{i: l_i = l} w_i) / n]

Both right sides are, in expectation over the pool, lower bounds on the log-probability of a real sampler: draw n
sentences from q (and a length from π), emit one of them (of that length) with probability ∝ w. x is among n
exchangeable draws: Σ_x q(x) n w(x) / Σ w counts every pool once, so the law sums to one; by length it sums to
Σ_l π_l P(some draw has length l) ≤ 1. Nothing else is assumed: few draws of a length make the bound loose, not wrong.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Integer

from freenergy.core.errors import UserError
from freenergy.models.length_law import LengthLaw
from freenergy.models.normalisers import PerLength, Single
from freenergy.partition.estimate import LogPartition
from freenergy.partition.weights import log_partition

Vector = Float64[np.ndarray, " _"]
Lengths = Integer[np.ndarray, " _"]


class LengthSums(NamedTuple):
    """Sums of the weights of a pool, by length 0 … m."""

    log_sum: Float64[np.ndarray, " lengths"]  # log Σ w
    log_squares: Float64[np.ndarray, " lengths"]  # log Σ w²
    draws: int  # all of them, with those of weight 0

    @classmethod
    def of(cls, log_weights: Vector, lengths: Lengths, draws: int, longest: int) -> "LengthSums":
        """Sum the weights of whole sentences; ``draws`` counts also those that were cut."""
        if draws < len(log_weights) or not draws:
            raise UserError(f"{len(log_weights)} weights of {draws} draws: count every draw, and draw one or more")
        if len(lengths) and int(lengths.max()) > longest:
            raise UserError(
                f"a draw has {int(lengths.max())} words, more than {longest}: draw within the field's space"
            )
        top = float(log_weights.max(initial=-np.inf)) if len(log_weights) else 0.0
        w = np.exp(log_weights - top)
        with np.errstate(divide="ignore"):
            first = np.log(np.bincount(lengths, w, longest + 1)) + top
            second = np.log(np.bincount(lengths, w**2, longest + 1)) + 2 * top
        return cls(first, second, draws)

    def single(self) -> Single:
        """Estimate log Z."""
        log_sum, squares = (float(np.logaddexp.reduce(each)) for each in (self.log_sum, self.log_squares))
        ess = math.exp(2 * log_sum - squares)
        error = math.sqrt(max(0.0, 1 / ess - 1 / self.draws))
        return Single(value=log_sum - math.log(self.draws), standard_error=error, ess=ess, draws=self.draws)

    def per_length(self) -> PerLength:
        """Estimate log Z_l of every length 1 … m; −inf where nothing was drawn."""
        with np.errstate(invalid="ignore"):
            ess = np.nan_to_num(np.exp(2 * self.log_sum - self.log_squares))[1:]
        error = np.sqrt(np.maximum(0.0, 1 / np.maximum(ess, 1e-300) - 1 / self.draws))
        values = self.log_sum[1:] - math.log(self.draws)
        return PerLength(values=values, standard_error=np.where(ess > 0, error, np.inf), ess=ess)

    def few(self, least: float = 30.0) -> int:
        """Return how many lengths have fewer effective draws than that."""
        ess = self.per_length().ess
        return 0 if ess is None else int(np.count_nonzero(ess < least))

    def certified(self, log_weight: Vector, lengths: Lengths, law: LengthLaw | None = None) -> Vector:
        """Return nats per sentence that are certain over q: globally, or by length with the law π."""
        n = self.draws + 1
        if law is None:
            total = np.full(len(log_weight), np.logaddexp.reduce(self.log_sum))
            bonus = np.zeros(len(log_weight))
        else:
            total, bonus = self.log_sum[lengths], law.log_prob(lengths)
        found: Vector = bonus + log_weight - np.logaddexp(log_weight, total) + math.log(n)
        return found


def pool_partition(log_weights: Vector, draws: int) -> LogPartition:
    """Return log Z of a pool with every diagnostic; draws without a weight have weight 0."""
    zeros = np.full(draws - len(log_weights), -np.inf)
    return log_partition(torch.from_numpy(np.concatenate([log_weights, zeros]))[None])
