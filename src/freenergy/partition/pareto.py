"""How heavy the tail of the weights is: Pareto k̂.

    y = w − w_(M+1) > 0 for the M largest of n weights,   M = min(n/5, 3√n)
    y ~ generalised Pareto(k, σ):   P(y > t) = (1 + k t/σ)^(−1/k)

Moments of order 1/k and above do not exist, so k ≥ 1/2 means an infinite variance, and from about 0.7 on no practical
number of draws helps (Vehtari et al. 2024). The fit is that of Zhang and Stephens (2009): a mean over the profile
likelihood of b = −k/σ, with k drawn towards 1/2 as if by ten more draws.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

FEWEST = 5  # exceedances that a fit needs
_PRIOR_DRAWS, _PRIOR_K, _PRIOR_SCALE = 10, 0.5, 3


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
