"""How far quasi-rejection is from its target, as a function of its bound (Eikema et al. 2022).

    x ~ q,  accepted with probability min(1, w(x)/β):      P_β(x) = q(x) · min(w(x), β) / Z_β,   Z_β = E_q[min(w, β)]
    acceptance rate = Z_β/β,      Z = E_q[w],      P(x) = q(x) · w(x) / Z
    TV(P, P_β) = E_q[(w/Z − min(w, β)/Z_β)⁺]  ≤  1 − Z_β/Z                 since P_β ≥ P · min(1, β/w)
    KL(P ‖ P_β) = log(Z_β/Z) + E_P[(log w − log β)⁺]

Every expectation is a mean over draws of q, so one set of draws gives the whole curve; the acceptance rate is unbiased,
the others are ratios. None of them accounts for weights that have not been seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.scored import Scored

_NEARLY_ALL = 0.9  # of the proposals with any weight


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The cost of a bound, and how far from the target it leaves the results."""

    log_bound: float  # log β
    acceptance: float  # Z_β/β
    total_variation: float  # TV(P, P_β)
    standard_error: float  # of the total variation, by the delta method
    at_most: float  # 1 − Z_β/Z, which the total variation does not exceed
    kl: float  # KL(P ‖ P_β), nats


def divergence_curve(
    candidates: Scored, log_bounds: Sequence[float] | None = None, *, num: int = 20
) -> list[Divergence]:
    """The divergence at each bound; without bounds, at ``num``: from accepting nearly all up to the largest weight."""
    if len(candidates.energy) != 1:
        raise UserError(f"candidates of {len(candidates.energy)} contexts were given: a curve is of one context")
    candidates.check_any_acceptable()
    log_weight = candidates.log_weight[0]
    if log_bounds is None:
        if num < 2:
            raise UserError(f"a curve of {num} bounds was asked for: ask for 2 or more")
        share, high = (log_weight > -torch.inf).double().mean().item(), float(log_weight.max())
        low = min(bound_for_acceptance(log_weight, _NEARLY_ALL * share), high)
        log_bounds = torch.linspace(low, high, num, dtype=torch.float64).tolist()
    return [divergence(log_weight, bound) for bound in log_bounds]


def divergence(log_weight: Float[Tensor, " n"], log_bound: float) -> Divergence:
    """The equations above, with the mean over n draws for E_q."""
    n, cut = len(log_weight), log_weight.clamp(max=log_bound)
    log_z, log_z_cut = _log_mean(log_weight), _log_mean(cut)
    p, p_cut = (log_weight - log_z).exp(), (cut - log_z_cut).exp()  # P/q and P_β/q
    more = p > p_cut
    tv = float((p - p_cut)[more].sum()) / n
    # what one more draw moves: its own term, and Z and Z_β in all the terms
    moves = (p - p_cut).clamp(min=0) - tv - (p * more).mean() * (p - 1) + (p_cut * more).mean() * (p_cut - 1)
    over = (log_weight - log_bound).clamp(min=0)
    return Divergence(
        log_bound=log_bound,
        acceptance=math.exp(log_z_cut - log_bound),
        total_variation=tv,
        standard_error=float((moves.square().mean() / (n - 1)).sqrt()) if n > 1 else math.inf,
        at_most=max(0.0, -math.expm1(log_z_cut - log_z)),
        kl=max(0.0, log_z_cut - log_z + float((p * over).mean())),
    )


def bound_for_acceptance(log_weight: Float[Tensor, " n"], acceptance: float) -> float:
    """The log of the bound at which this share of proposals is accepted."""
    there = log_weight[log_weight > -torch.inf]
    if acceptance > len(there) / len(log_weight):
        raise UserError(
            f"an acceptance of {acceptance:g} cannot be reached: {len(there)} of {len(log_weight)} proposals have any "
            "weight; ask for less"
        )
    # Z_β/β is the share with any weight at the smallest of them, and below w_max/β
    low, high = float(there.min()), float(there.max()) - math.log(acceptance)
    return _root(lambda s: _log_mean(log_weight.clamp(max=s)) - s - math.log(acceptance), low, high)


def bound_for_distance(log_weight: Float[Tensor, " n"], distance: float) -> float:
    """The log of the smallest bound at which the total variation is no more than this."""
    there = log_weight[log_weight > -torch.inf]
    low, high = float(there.min()), float(there.max())
    return _root(lambda s: divergence(log_weight, s).total_variation - distance, low, high)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is zero; the lower end where it is below zero already, the upper where never."""
    if falling(low) <= 0:
        return low
    return high if falling(high) >= 0 else float(brentq(falling, low, high, xtol=1e-13))  # equal weights: by rounding


def _log_mean(log_weight: Float[Tensor, " n"]) -> float:
    return float(log_weight.logsumexp(0)) - math.log(len(log_weight))
