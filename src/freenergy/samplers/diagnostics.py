"""Whether chains have mixed: split R̂, bulk and tail effective sample sizes, acceptance, and a verdict in words.

    R̂ = √(variance between and within half-chains / variance within), of ranks: 1 where chains agree
    bulk ESS, tail ESS: independent draws that would be worth as much for the middle and for the 5 % and 95 % quantiles
    τ = chains · draws / bulk ESS: steps per independent draw

They are computed by ArviZ (rank-normalised and folded, Vehtari et al. 2021). ``verdict`` is empty where nothing speaks
against the chains: R̂ ≤ 1.01, at least 100 effective draws per statistic, every chain has moved.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError

MAX_R_HAT = 1.01
MIN_ESS = 100.0
_LOW_ACCEPTANCE = 0.01
_SHORTEST = 4  # draws per chain


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostics:
    """Numbers of every statistic that was traced, and of every chain; NaN where a statistic never varies."""

    r_hat: dict[str, float]
    ess_bulk: dict[str, float]
    ess_tail: dict[str, float]
    tau: dict[str, float]
    acceptance: Float[Tensor, " chains"] | None
    still: tuple[int, ...]  # the chains that never moved
    chains: int
    draws: int

    def verdict(self) -> str:
        """Return one sentence with all that speaks against the chains, or an empty string."""
        reasons = list[str]()
        if self.still:
            few = ", ".join(map(str, self.still[:3])) + (", …" if len(self.still) > 3 else "")
            reasons.append(f"{len(self.still)} of {self.chains} chains never moved ({few})")
        for name in self.r_hat:
            if math.isnan(self.r_hat[name]):
                reasons.append(f"{name} never changes")
            elif self.r_hat[name] > MAX_R_HAT:
                reasons.append(f"chains disagree on {name} (R̂ {self.r_hat[name]:.3f}, at most {MAX_R_HAT} is wanted)")
            elif min(self.ess_bulk[name], self.ess_tail[name]) < MIN_ESS:
                ess = min(self.ess_bulk[name], self.ess_tail[name])
                reasons.append(f"{name} has {ess:.0f} effective draws, fewer than {MIN_ESS:.0f}")
        if self.acceptance is not None and float(self.acceptance.mean()) < _LOW_ACCEPTANCE:
            reasons.append(f"only {float(self.acceptance.mean()):.2%} of proposals are accepted")
        if not reasons:
            return ""
        return f"the chains have not mixed: {'; '.join(reasons)}; make more steps, or choose another kernel"


def diagnose(
    values: Mapping[str, Float[Tensor, "chains draws"]], acceptance: Float[Tensor, " chains"] | None = None
) -> Diagnostics:
    """Compare chains [chains, draws] of every statistic; ``acceptance`` is each chain's share of accepted proposals.

    >>> import torch
    >>> values = torch.arange(400.0).sin().view(4, 100)
    >>> diagnose({"sine": values}).r_hat["sine"] < 1.1
    True
    """
    if not values:
        raise UserError("there is nothing to diagnose: trace at least one statistic")
    arrays = {name: np.asarray(own.double().cpu().numpy()) for name, own in values.items()}
    chains, draws = next(iter(arrays.values())).shape
    if draws < _SHORTEST:
        raise UserError(f"chains of {draws} draws cannot be diagnosed: make at least {_SHORTEST} steps")
    rows = {name: _numbers(own) for name, own in arrays.items()}
    still = () if acceptance is None else tuple((acceptance == 0).nonzero().flatten().tolist())
    return Diagnostics(
        r_hat={name: row[0] for name, row in rows.items()},
        ess_bulk={name: row[1] for name, row in rows.items()},
        ess_tail={name: row[2] for name, row in rows.items()},
        tau={name: chains * draws / row[1] for name, row in rows.items()},
        acceptance=acceptance, still=still, chains=chains, draws=draws,
    )  # fmt: skip


def _numbers(values: np.ndarray) -> tuple[float, float, float]:
    from arviz_stats.base.array import array_stats  # here, since it takes a second to import

    if np.ptp(values) == 0:
        return math.nan, math.nan, math.nan
    with warnings.catch_warnings():  # a chain that stands still divides by its variance of 0
        warnings.simplefilter("ignore")
        r_hat = float(array_stats.rhat(values, chain_axis=0, draw_axis=1))
        bulk = float(array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk"))
        tail = float(array_stats.ess(values, chain_axis=0, draw_axis=1, method="tail", prob=(0.05, 0.95)))
    return (math.inf if math.isnan(r_hat) else r_hat), bulk, tail
