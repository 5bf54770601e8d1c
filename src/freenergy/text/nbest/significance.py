"""Error rates of ways to choose from lists, and whether one is better than another.

    rate = Σ_d e_d / Σ_d n_d,        difference of a and b = Σ_d (e_d(a) − e_d(b)) / Σ_d n_d
    p = 2 · T_{D−1}(Φ⁻¹(s) · √((D − 1)/D)),      s = the share of resamples on the other side of 0, with 0 itself

e_d the errors of what was chosen in document d, n_d the words of its references or its lists. A rate has the linearised
interval over documents of ``evaluation.perplexity``. A difference is paired: documents are resampled with both choices,
as in ``evaluation.bootstrap``. Its p-value belongs to its interval, so that p < 5 % where 0 lies outside.
"""

from array import array
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri, stdtr, stdtrit  # scipy.stats takes a second to import

from freenergy.core.files import fingerprint
from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import FEWEST, ends_of, resampled
from freenergy.evaluation.perplexity import CONFIDENCE, Measurement, measured_rate
from freenergy.text.nbest.nbest import NBest


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """How many fewer errors, with its interval; and how often chance alone would show as much."""

    difference: Measurement  # below 0: fewer errors
    p_value: float | None


@final
class Tally:
    """Errors of the choices of several systems, list by list: a few numbers each, whatever the texts."""

    def __init__(self) -> None:
        self.unit: str | None = None
        self._errors: dict[str, array[float]] = {}
        self._units, self._documents = array("d"), array("q")
        self._numbers: dict[tuple[str, int | str], int] = {}

    def add(self, one: NBest, errors: dict[str, float]) -> None:
        """One list: the errors of what each system has chosen from it."""
        self.unit = one.unit
        for system, wrong in errors.items():
            self._errors.setdefault(system, array("d")).append(wrong)
        self._units.append(one.units)
        document = ("list", one.line) if one.document is None else ("document", fingerprint(one.document))
        self._documents.append(self._numbers.setdefault(document, len(self._numbers)))

    def __len__(self) -> int:
        return len(self._units)

    @property
    def units(self) -> Float[np.ndarray, " D"]:
        """Words or lists of each document."""
        return self._by_document(self._units)

    def errors(self, system: str) -> Float[np.ndarray, " D"]:
        """What a system has got wrong in each document."""
        return self._by_document(self._errors[system])

    def rates(self) -> dict[str, list[float | None]]:
        """Each system's error rate with its interval: value, low, high."""
        return {name: _share(measured_rate(self.errors(name), self.units)).to_json() for name in self._errors}

    def compare(self, a: str, b: str, rng: Rng, resamples: int) -> dict[str, Any]:
        """How a differs from b."""
        found = compare(self.errors(a), self.errors(b), self.units, rng.child(a, b), resamples)
        return {"system": a, "against": b, "difference": found.difference.to_json(), "p_value": found.p_value}

    def _by_document(self, values: "array[float]") -> Float[np.ndarray, " D"]:
        return np.bincount(np.array(self._documents), np.array(values))


def compare(
    a: Float[np.ndarray, " D"],
    b: Float[np.ndarray, " D"],
    units: Float[np.ndarray, " D"],
    rng: Rng,
    resamples: int = 10_000,
) -> Comparison:
    """The paired difference of two error rates over the same documents."""
    gap, D = a - b, len(a)
    linear = measured_rate(gap, units)
    if linear.value is None or linear.low is None:
        return Comparison(linear, None)
    if not gap.any():
        return Comparison(linear, 1.0)
    if D < FEWEST:  # too few to resample: Student's t
        reach = float(stdtrit(D - 1, (1 + CONFIDENCE) / 2))
        se = (linear.value - linear.low) / reach
        return Comparison(linear, float(2 * stdtr(D - 1, -abs(linear.value) / se)) if se else 0.0)
    G = resampled(gap, units, resamples, rng)
    low, high = np.quantile(G, ends_of(D)).tolist()
    other_side = (1 + min((G <= 0).sum(), (G >= 0).sum())) / (resamples + 1)
    p = 2 * stdtr(D - 1, ndtri(other_side) * ((D - 1) / D) ** 0.5)
    return Comparison(Measurement(linear.value, low, high), min(1.0, float(p)))


def _share(rate: Measurement) -> Measurement:
    """No rate of errors is below 0."""
    return rate if rate.low is None else Measurement(rate.value, max(rate.low, 0.0), rate.high)
