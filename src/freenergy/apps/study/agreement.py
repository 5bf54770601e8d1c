"""Whether raters agree, beyond chance.

    n_uc votes of value c for unit u,  m_u = Σ_c n_uc ≥ 2,  n_c = Σ_u n_uc,  n = Σ_c n_c

    share of agreeing pairs of votes = Σ_u Σ_c n_uc (n_uc − 1) / Σ_u m_u (m_u − 1)
    α = 1 − D_o/D_e,   D_o = 1/n Σ_u (m_u² − Σ_c n_uc²)/(m_u − 1),   D_e = (n² − Σ_c n_c²)/(n (n − 1))

α is Krippendorff's for nominal values, which takes any number of raters and missing votes: 1 is agreement, 0 is what
chance gives. Units with one vote say nothing about agreement and are left out. The interval is a bootstrap over units.
"""

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float

from freenergy.core.rng import Rng

_RESAMPLES = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement over units with two votes or more; None if undefined, as when all votes are the same."""

    units: int
    share: float | None
    alpha: float | None
    interval: tuple[float, float] | None  # of alpha, 95 %

    def to_json(self) -> dict[str, Any]:
        """Return JSON-like values."""
        return asdict(self)


def agreement(counts: Float[np.ndarray, "U C"], rng: Rng) -> Agreement:
    """Compute it from the votes for each of C values in U units."""
    kept = counts[counts.sum(1) >= 2]
    U, m = len(kept), kept.sum(1)
    if U == 0:
        return Agreement(units=0, share=None, alpha=None, interval=None)
    share = float((kept * (kept - 1)).sum() / (m * (m - 1)).sum())
    (alpha,) = _alpha(kept, np.ones((1, U)))
    places = (rng.uniform(_RESAMPLES, U).numpy() * U).astype(np.int64)
    times = np.stack([np.bincount(row, minlength=U) for row in places]).astype(np.float64)
    found = _alpha(kept, times)
    found = found[np.isfinite(found)]
    if not np.isfinite(alpha):
        return Agreement(units=U, share=share, alpha=None, interval=None)
    low, high = np.quantile(found, [0.025, 0.975])
    return Agreement(units=U, share=share, alpha=float(alpha), interval=(float(low), float(high)))


def _alpha(counts: Float[np.ndarray, "U C"], times: Float[np.ndarray, "R U"]) -> Float[np.ndarray, " R"]:
    """Return α of R resamples, in each of which unit u occurs ``times`` often; NaN if all votes are the same."""
    m = counts.sum(1)
    disagreeing = (m**2 - (counts**2).sum(1)) / (m - 1)
    n_c = times @ counts
    n = n_c.sum(1)
    observed, expected = times @ disagreeing / n, (n**2 - (n_c**2).sum(1)) / (n * (n - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected > 0, 1 - observed / expected, np.nan)
