"""Which model is preferred, whether that can be chance, and whether raters agree.

    k of n pairs are for B:     rate = k/n,     p = P(X ≥ k), X ~ Binomial(n, 1/2)     (one-sided, exact)

A pair is for the model that more raters chose. Where votes were dropped a pair may be a tie, and there are three ways
to count it. Table 2 of Deng et al. (2020) has the first two; docs/study.md shows that its n holds ties.

    strict      A < B   k = pairs for B            n = all pairs with votes   ties count against B
    not worse   A ≤ B   k = pairs for B and ties   n = all pairs with votes   ties count for B
    decided     A < B   k = pairs for B            n = pairs for A or B       ties left out: the sign test

Agreement beyond chance:

    n_uc votes of value c for unit u,  m_u = Σ_c n_uc ≥ 2,  n_c = Σ_u n_uc,  n = Σ_c n_c

    share of agreeing pairs of votes = Σ_u Σ_c n_uc (n_uc − 1) / Σ_u m_u (m_u − 1)
    α = 1 − D_o/D_e,   D_o = 1/n Σ_u (m_u² − Σ_c n_uc²)/(m_u − 1),   D_e = (n² − Σ_c n_c²)/(n (n − 1))

α is Krippendorff's for nominal values, which takes any number of raters and missing votes: 1 is agreement, 0 is what
chance gives. Units with one vote say nothing about agreement and are left out. The interval is a bootstrap over units.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float
from scipy.stats import binomtest

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng

_RESAMPLES = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A rate with its test. The interval is Clopper and Pearson's, of 95 %, two-sided; None where n is 0."""

    k: int
    n: int
    rate: float | None
    p_value: float | None
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, k: int, n: int) -> "Preference":
        """Compute it for k of n."""
        if not 0 <= k <= n:
            raise UserError(f"{k} of {n} pairs is impossible: give a count from 0 to {n}")
        if n == 0:
            return cls(k=0, n=0, rate=None, p_value=None, interval=None)
        found = binomtest(k, n, 0.5).proportion_ci(0.95, method="exact")
        p_value = float(binomtest(k, n, 0.5, alternative="greater").pvalue)
        return cls(k=k, n=n, rate=k / n, p_value=p_value, interval=(float(found.low), float(found.high)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Counts of pairs for A, for B, and for neither."""

    a: int
    b: int
    ties: int

    @classmethod
    def of(cls, votes: list[tuple[int, int]]) -> "Outcomes":
        """Count from the votes for A and B of each pair; pairs without a vote are skipped, not ties."""
        asked = [(a, b) for a, b in votes if a + b]
        return cls(a=sum(a > b for a, b in asked), b=sum(b > a for a, b in asked), ties=sum(a == b for a, b in asked))

    @property
    def pairs(self) -> int:
        """Pairs with votes."""
        return self.a + self.b + self.ties

    def tests(self) -> dict[str, Preference]:
        """Return the test under each of the three ways to count ties."""
        return {
            "decided": Preference.of(self.b, self.a + self.b),
            "strict": Preference.of(self.b, self.pairs),
            "not_worse": Preference.of(self.b + self.ties, self.pairs),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement over units with two votes or more; None if undefined, as when all votes are the same."""

    units: int
    share: float | None
    alpha: float | None
    interval: tuple[float, float] | None  # of alpha, 95 %


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
