"""Which model is preferred, and whether that can be chance.

    k of n pairs are for B:     rate = k/n,     p = P(X ≥ k), X ~ Binomial(n, 1/2)     (one-sided, exact)

A pair is for the model that more raters chose. Where votes were dropped a pair may be a tie, and there are three ways
to count it. Table 2 of Deng et al. (2020) has the first two; docs/study.md shows that its n holds ties.

    strict      A < B   k = pairs for B            n = all pairs with votes   ties count against B
    not worse   A ≤ B   k = pairs for B and ties   n = all pairs with votes   ties count for B
    decided     A < B   k = pairs for B            n = pairs for A or B       ties left out: the sign test
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, final

from scipy.stats import binomtest

from freenergy.core.errors import UserError


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

    def to_json(self) -> dict[str, Any]:
        """Return JSON-like values."""
        return asdict(self)


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


def counts_behind(percent: str, p_value: str, max_n: int) -> Iterator[tuple[int, int]]:
    """Yield every k of n ≤ ``max_n`` whose rate and one-sided p-value round to what is printed.

    >>> list(counts_behind("58.93", "0.00084", 333))
    [(188, 319)]
    """
    for n in range(1, max_n + 1):
        middle = round(float(percent) / 100 * n)
        for k in (middle - 1, middle, middle + 1):
            if 0 <= k <= n and _rounds_to(100 * k / n, percent):
                found = Preference.of(k, n).p_value
                if found is not None and _rounds_to(found, p_value):
                    yield k, n


def _rounds_to(value: float, printed: str) -> bool:
    """Whether a number rounds to a printed one; halves may be rounded either way."""
    shown = Decimal(printed)
    half = Decimal(5).scaleb(int(shown.as_tuple().exponent) - 1)
    return abs(Decimal(value) - shown) <= half * (1 + Decimal("1e-9"))
