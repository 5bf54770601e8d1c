"""Running sums of weights, from which every estimate of log Z is made.

    S_k = Σ w^k,    u = w/S_1,    T_n = log(S_1/n),
    n (T_n − T̄) = n log(1 − 1/n) + 1 + Σ_i g(u_i),      g(u) = −log(1 − u) − u = u²/2 + u³/3 + …

Draws come in batches and are folded in, so that a million of them do not need a million numbers. The largest
weights of each context are kept one by one; every other is below a share of 1/KEPT, so for those the series of g ends
after u⁴ at rounding, and S_1 … S_4 are all that is needed. The leave-one-out mean T̄ is never formed: T_n − T̄ is of
order 1/n and is multiplied by n, so it is summed without the two large numbers. For the largest weight 1 − u is the
share of the others, summed without it. Everything is in logs and float64, so weights may be 2,000 nats apart.
"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.partition.estimate import LogPartition, pareto_k

KEPT = 5000  # the whole tail that k̂ looks at, up to 2.7 million draws
_POWERS = torch.arange(1, 5, dtype=torch.float64)


@final
class WeightSums:
    """Sums over the draws of B contexts, batch by batch.

    >>> sums = WeightSums.empty(1)
    >>> sums.add(torch.tensor([[0.0, 1.0]]))
    >>> sums.add(torch.tensor([[2.0]]))
    >>> sums.n, round(sums.log_mean().item(), 4)
    (3, 1.309)
    """

    def __init__(self, num: int) -> None:
        self.n = 0
        self._kept = torch.zeros(num, 0, dtype=torch.float64)  # the largest log-weights, sorted downwards
        self._rest = torch.full((num, len(_POWERS)), -math.inf, dtype=torch.float64)  # log S_1 … log S_4 of the others
        self._moments = torch.zeros(num, 3, dtype=torch.float64)  # of finite log-weights: count, mean, Σ (· − mean)²

    @classmethod
    def empty(cls, num: int) -> "WeightSums":
        """Start without draws, for ``num`` contexts."""
        return cls(num)

    def add(self, log_weights: Float[Tensor, "B m"]) -> None:
        """Fold in m more draws of each context; −inf is a weight of zero."""
        log_weights = log_weights.detach().double().cpu()
        if len(log_weights) != len(self._kept):
            raise UserError(f"log-weights of {len(log_weights)} contexts for {len(self._kept)}: give one row each")
        _check(log_weights)
        self.n += log_weights.shape[1]
        self._moments = _merged_moments(self._moments, log_weights)
        ranked = torch.cat([self._kept, log_weights], dim=1).sort(dim=1, descending=True).values
        self._kept, others = ranked[:, :KEPT].clone(), ranked[:, KEPT:]
        if others.shape[1]:
            sums = torch.stack([(k * others).logsumexp(1) for k in _POWERS], dim=1)
            self._rest = torch.logaddexp(self._rest, sums)

    def log_mean(self) -> Float[Tensor, " B"]:
        """T_n = log mean w: the lower estimate alone, which needs one draw or more."""
        if self.n < 1:
            raise UserError("an estimate of log Z needs one draw or more: add some")
        return self._log_sums(1) - math.log(self.n)

    def certified_gain(self, log_weight_of_data: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Return nats per sequence that resampling is certain to gain: the datum next to the n − 1 draws so far.

        log w(x) − log[(w(x) + Σ_{i<n} w_i)/n]; see ``partition.certificate``. n must not depend on the weights.
        """
        log_w = log_weight_of_data.detach().double().cpu()
        _check(log_w.unsqueeze(1))
        gain = log_w - torch.logaddexp(log_w, self._log_sums(1)) + math.log(self.n + 1)
        return torch.where(log_w == -math.inf, log_w, gain)

    def log_partition(self) -> LogPartition:
        """Return every estimate and diagnostic of the draws so far, of which there must be two."""
        if self.n < 2:
            raise UserError(f"the upper estimate needs at least two draws per context, not {self.n}: add some")
        n, log_sum, lower = self.n, self._log_sums(1), self.log_mean()
        nothing = log_sum == -math.inf
        share_of_squares = (self._log_sums(2) - 2 * log_sum).exp()
        gap = (n * math.log1p(-1 / n) + 1 + self._sum_of_g(log_sum)) / n  # T_n − T̄
        excess = ((n * share_of_squares - 1) / (n - 1)).clamp(min=0)
        finite, _, squares = self._moments.unbind(1)
        return LogPartition(
            lower=lower,
            upper=torch.where(nothing, math.inf, lower + 2 * (n - 1) * gap),
            jackknife=torch.where(nothing, -math.inf, lower + (n - 1) * gap),
            standard_error=torch.where(nothing, math.inf, excess.sqrt()),
            ess=torch.where(nothing, 0.0, 1 / share_of_squares),
            largest_share=torch.where(nothing, 0.0, (self._kept[:, 0] - log_sum).exp()),
            k_hat=torch.tensor([pareto_k(kept, n) for kept in self._kept], dtype=torch.float64),
            spread=(squares / (finite - 1).clamp(min=1)).sqrt(),
            draws=torch.full_like(log_sum, n, dtype=torch.long),
        )

    def _log_sums(self, power: int) -> Float[Tensor, " B"]:
        """log S_k, over all draws."""
        return torch.logaddexp((power * self._kept).logsumexp(1), self._rest[:, power - 1])

    def _sum_of_g(self, log_sum: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Σ_i g(u_i): the largest through the share of the others, the kept by log1p, the rest by the series."""
        u = (self._kept - log_sum.unsqueeze(1)).exp()
        others = torch.logaddexp(self._kept[:, 1:].logsumexp(1), self._rest[:, 0])
        largest = log_sum - others - u[:, 0]
        kept = (-torch.log1p(-u[:, 1:]) - u[:, 1:]).sum(1)
        powers = self._rest[:, 1:] - _POWERS[1:] * log_sum.unsqueeze(1)
        return largest + kept + (powers.exp() / _POWERS[1:]).sum(1)


def log_partition(log_weights: Float[Tensor, "B n"]) -> LogPartition:
    """Return every estimate of log Z of B contexts from all their draws at once.

    >>> log_partition(torch.zeros(1, 100)).upper.round(decimals=9).tolist()
    [0.0]
    """
    sums = WeightSums.empty(len(log_weights))
    sums.add(log_weights)
    return sums.log_partition()


def _check(log_weights: Tensor) -> None:
    bad = log_weights.isnan() | (log_weights == math.inf)
    if bad.any():
        b, i = bad.nonzero()[0].tolist()
        raise UserError(
            f"the log-weight of draw {i} of context {b} is {log_weights[b, i].item()}: look at the energy of that text"
        )


def _merged_moments(before: Float[Tensor, "rows 3"], log_weights: Float[Tensor, "rows m"]) -> Float[Tensor, "rows 3"]:
    """Count, mean and sum of squares about the mean, with a batch folded in; zero weights are left out."""
    finite = log_weights > -math.inf
    count = finite.sum(1).double()
    values = log_weights.masked_fill(~finite, 0.0)
    mean = values.sum(1) / count.clamp(min=1)
    squares = ((values - mean.unsqueeze(1)) * finite).square().sum(1)
    n, old_mean, old_squares = before.unbind(1)
    total, step = (n + count).clamp(min=1), mean - old_mean
    return torch.stack(
        [n + count, old_mean + step * count / total, old_squares + squares + step.square() * n * count / total], dim=1
    )
