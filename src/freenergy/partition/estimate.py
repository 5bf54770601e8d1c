"""log Z with diagnostics: whether to believe it.

    T_n = log mean w                                 lower:      E[T_n] ≤ log Z
    T_n + 2(n − 1)(T_n − T̄)                          upper:      Eq. 4 of Deng et al. 2020, for large n
    T_n + (n − 1)(T_n − T̄)                           jackknife:  bias O(1/n²) instead of O(1/n)
    T̄ = mean_i log mean_{j≠i} w_j                    leave one out
    se² = (n Σ u² − 1)/(n − 1),   u = w/Σw           of T_n (delta method)
    ESS = 1/Σ u²,   largest share = max u,   k̂ of the tail,   spread = standard deviation of log w

"Upper" is a name, not a promise: it is above log Z in expectation for n large enough, how large depends on the weights
(with a spread of 4 it is still below at 2,048 draws), and a single one is below log Z about every second time.
``verdicts`` says where these numbers should not be believed. The certificate needs no such care: it holds at every n.

Pareto k̂ says how heavy the tail of the weights is:

    y = w − w_(M+1) > 0 for the M largest of n weights,   M = min(n/5, 3√n)
    y ~ generalised Pareto(k, σ):   P(y > t) = (1 + k t/σ)^(−1/k)

Moments of order 1/k and above do not exist, so k ≥ 1/2 means an infinite variance, and from about 0.7 on no practical
number of draws helps (Vehtari et al. 2024). The fit is that of Zhang and Stephens (2009): a mean over the profile
likelihood of b = −k/σ, with k drawn towards 1/2 as if by ten more draws.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

_FEW_EFFECTIVE = 100.0
LARGE_SHARE = 0.5  # of one draw: nothing that is estimated from such weights is worth reporting
_HEAVIEST_TAIL = 0.7
FEWEST = 5  # exceedances that a fit of the tail needs
_PRIOR_DRAWS, _PRIOR_K, _PRIOR_SCALE = 10, 0.5, 3
_REMEDY = "make more draws, or report the certificate"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogPartition:
    """Estimates of log Z of B contexts, and their diagnostics; float64.

    ``upper`` and ``jackknife`` are inf where all the weight is on one draw. ``k_hat`` is NaN where there are too few
    draws to estimate it, −inf where the largest weights are equal.
    """

    lower: Float[Tensor, " B"]
    upper: Float[Tensor, " B"]
    jackknife: Float[Tensor, " B"]
    standard_error: Float[Tensor, " B"]
    ess: Float[Tensor, " B"]
    largest_share: Float[Tensor, " B"]
    k_hat: Float[Tensor, " B"]
    spread: Float[Tensor, " B"]
    draws: Int[Tensor, " B"]

    @classmethod
    def exact(cls, log_z: Float[Tensor, " B"], strings: int) -> "LogPartition":
        """Return a sum over ``strings`` strings, which has no error."""
        none, n = torch.zeros_like(log_z), torch.full_like(log_z, strings)
        return cls(
            lower=log_z, upper=log_z, jackknife=log_z, standard_error=none, ess=n, largest_share=none,
            k_hat=torch.full_like(log_z, -math.inf), spread=none, draws=n.long(),
        )  # fmt: skip

    @property
    def n(self) -> int:
        """The draws per context; the minimum where they differ."""
        return int(self.draws.min())

    @staticmethod
    def cat(parts: "Sequence[LogPartition]") -> "LogPartition":
        """Join estimates of other contexts, in order."""
        names = [field.name for field in fields(LogPartition)]
        return LogPartition(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def verdicts(self) -> list[str]:
        """Return for each context why its estimates should not be believed, or an empty string."""
        numbers = (self.draws, self.ess, self.largest_share, self.spread, self.k_hat)
        return [_verdict(*row) for row in zip(*(values.tolist() for values in numbers), strict=True)]

    def verdict(self) -> str:
        """Return one sentence on all contexts; empty where nothing speaks against believing them."""
        B, (bad, why) = len(self.draws), main_reason(self.verdicts())
        where = "" if B == 1 else f" in {bad} of {B} contexts"
        return f"log Z and its upper estimate are not to be trusted{where}: {why}; {_REMEDY}" if bad else ""


def main_reason(verdicts: list[str]) -> tuple[int, str]:
    """Return how many verdicts are not empty, and the most frequent of them in words."""
    reasons = Counter(filter(None, verdicts))
    most, count = reasons.most_common(1)[0] if reasons else ("", 0)
    return reasons.total(), most if count == reasons.total() else f"{most} ({count}) and other reasons"


def heaviest_tail(n: int) -> float:
    """The largest k̂ that n draws can bear: min(1 − 1/log10 n, 0.7).

    >>> heaviest_tail(100), heaviest_tail(10**6)
    (0.5, 0.7)
    """
    return min(1 - 1 / math.log10(n), _HEAVIEST_TAIL) if n > 1 else -math.inf


def _verdict(n: int, ess: float, largest_share: float, spread: float, k_hat: float) -> str:
    if ess == 0:
        return "no draw has any weight"
    if largest_share > LARGE_SHARE:
        return "one draw carries most of the weight"
    if ess < min(_FEW_EFFECTIVE, n / 2):
        return "few draws carry the weight"
    if spread**2 > math.log(n):  # log-normal weights would need e^(spread²) draws
        return "the log-weights spread too far for so few draws"
    if math.isnan(k_hat):
        return "there are too few draws to tell"
    if k_hat > heaviest_tail(n):
        return "the tail of the weights is too heavy for so few draws"
    return ""


def tail_length(n: int) -> int:
    """M, the number of weights in the tail of n.

    >>> tail_length(100), tail_length(10_000)
    (20, 300)
    """
    return min(n // 5, int(3 * math.sqrt(n)))


def pareto_k(log_weights: Float[Tensor, " kept"], n: int) -> float:
    """k̂ of n draws from the log-weights of the largest of them, sorted downwards; float64.

    NaN where there are too few for a fit, −inf where the largest weights are all equal (no tail), inf where they are
    too far apart for a float. ``kept`` may be fewer than the tail's length: then the tail is what is there.
    """
    M = min(tail_length(n), len(log_weights) - 1)
    if M < FEWEST or log_weights[0] == -math.inf:
        return math.nan
    log_cutoff = log_weights[M]
    above = log_weights[:M][log_weights[:M] > log_cutoff].flip(0)  # ties with the cutoff are not exceedances
    if len(above) < FEWEST:
        return math.nan if len(above) else -math.inf
    y = (above - above[-1]).exp() - (log_cutoff - above[-1]).exp()
    return _fit(y) if y[_quartile(len(y))] > 0 else math.inf


def _fit(y: Float[Tensor, " M"]) -> float:
    """k of exceedances sorted upwards."""
    M = len(y)
    grid = 30 + int(math.sqrt(M))
    j = torch.arange(1, grid + 1, dtype=torch.float64)
    b = 1 / y[-1] + (1 - (grid / (j - 0.5)).sqrt()) / (_PRIOR_SCALE * y[_quartile(M)])
    k = torch.log1p(-b.unsqueeze(1) * y).mean(1)
    likelihood = M * ((-b / k).log() - k - 1)
    mean_b = (likelihood.softmax(0) * b).sum()
    k_hat = torch.log1p(-mean_b * y).mean().item()
    return (M * k_hat + _PRIOR_DRAWS * _PRIOR_K) / (M + _PRIOR_DRAWS)


def _quartile(M: int) -> int:
    return int(M / 4 + 0.5) - 1
