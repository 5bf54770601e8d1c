"""Scores of several models as one, and the weights that make the fewest errors on a development set.

    s = λ_base · log_base − λ_energy · E + Σ_k λ_k · score_k + λ_length · tokens
    error(λ) = Σ_lists errors of argmax_i λ · f_i,         along a line λ + γ d:   argmax_i (a_i + γ b_i)

With weights 1, 1 and 0 for the length, and no other scores, s is the residual model's log_score. A candidate that the
residual model forbids (probability zero) is never chosen.

The error is a staircase: it changes only where another candidate takes the lead, and along a line each list's leaders
are the upper envelope of N straight lines. So the minimum along a line is found exactly, by merging the steps of all
lists (Och 2003). Coordinates and random directions are searched until none helps, from several starts: the weights
given, the minimum of the expected error Σ_lists Σ_i softmax(λ · f)_i · errors_i, and random ones. A step is only taken
if it makes fewer errors, and of equally good intervals the one nearest to the start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.text.nbest.nbest import NBest
from freenergy.text.ranking import Ranking

_SILENT = Silent()
_ROUNDS = 50
_ROUNDING = 1e-9  # what rounding alone may do to sums of errors and to the places of steps


@final
class Combination:
    """Named weights of the terms of s."""

    def __init__(self, names: Iterable[str], weights: Mapping[str, float] | None = None) -> None:
        self.names = ("base", "energy", *sorted(names), "length")
        unknown = sorted(set(weights or {}) - set(self.names))
        if unknown:
            raise UserError(f"there is no score {unknown[0]!r} to give a weight to: choose of {', '.join(self.names)}")
        self.weights = {name: 0.0 if name == "length" else 1.0 for name in self.names} | dict(weights or {})
        bad = [name for name, weight in self.weights.items() if not np.isfinite(weight)]
        if bad or not any(self.weights.values()):
            raise UserError(f"the weights {self.weights} choose nothing: give finite ones, not all of them 0")

    @property
    def is_joint(self) -> bool:
        """True when s is log_score."""
        return self.weights == Combination(()).weights

    @property
    def vector(self) -> Float[np.ndarray, " K"]:
        """The weights in the order of ``names``."""
        return np.array([self.weights[name] for name in self.names])

    def __call__(self, one: NBest, ranking: Ranking) -> Float[np.ndarray, " N"]:
        """s of each candidate; −inf where the residual model forbids it."""
        return np.where(allowed(ranking), weighted(self.terms(one, ranking), self.vector), -np.inf)

    def terms(self, one: NBest, ranking: Ranking) -> Float[np.ndarray, "N K"]:
        """What the weights multiply; 0 for a candidate that is forbidden."""
        columns: dict[str, Sequence[float]] = {
            **one.scores,
            "base": [candidate.log_base for candidate in ranking.candidates],
            "energy": [-candidate.energy for candidate in ranking.candidates],
            "length": [float(candidate.tokens) for candidate in ranking.candidates],
        }
        terms = np.array([columns[name] for name in self.names]).T
        return np.where(allowed(ranking)[:, None], terms, 0.0)


def weighted(terms: Float[np.ndarray, "*lists K"], weights: Float[np.ndarray, " K"]) -> Float[np.ndarray, "*lists"]:
    """Σ_k λ_k f_k, each candidate by itself: a matrix product may round equal rows differently, which breaks ties."""
    return np.asarray((terms * weights).sum(-1))


def allowed(ranking: Ranking) -> np.ndarray:
    """The candidates with a probability above zero."""
    return np.array([candidate.log_score > -np.inf for candidate in ranking.candidates])


@final
@dataclass(frozen=True, slots=True)
class Development:
    """D lists of up to N candidates with K terms each; what is beyond a list's end is not ``there``."""

    terms: Float[np.ndarray, "D N K"]
    errors: Float[np.ndarray, "D N"]
    there: Bool[np.ndarray, "D N"]
    units: float  # words of the references, or lists

    @classmethod
    def of(cls, scored: Iterable[tuple[NBest, Ranking]], combination: Combination) -> "Development":
        """From lists that say how wrong their candidates are."""
        rows = [
            (combination.terms(one, ranking), np.array(one.errors()), allowed(ranking), one.units)
            for one, ranking in scored
            if one.unit is not None
        ]
        if not rows:
            raise UserError("no list says how wrong its candidates are: give each a reference or errors to tune on")
        D, N, K = len(rows), max(len(errors) for _, errors, _, _ in rows), len(combination.names)
        terms, errors, there = np.zeros((D, N, K)), np.zeros((D, N)), np.zeros((D, N), dtype=bool)
        for d, (f, wrong, may, _) in enumerate(rows):
            terms[d, : len(f)], errors[d, : len(f)], there[d, : len(f)] = f, wrong, may
        return cls(terms, errors, there, float(sum(units for *_, units in rows)))

    def total(self, weights: Float[np.ndarray, " K"]) -> float:
        """Errors of the chosen candidates; of equals the earlier one is chosen."""
        s = np.where(self.there, weighted(self.terms, weights), -np.inf)
        return float(np.take_along_axis(self.errors, s.argmax(1)[:, None], 1).sum())

    def expected(self, weights: Float[np.ndarray, " K"]) -> tuple[float, Float[np.ndarray, " K"]]:
        """Errors of a candidate drawn from softmax(s), and their gradient."""
        s = np.where(self.there, weighted(self.terms, weights), -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        mean = (p * self.errors).sum(1, keepdims=True)
        return float(mean.sum()), np.einsum("dn,dnk->k", p * (self.errors - mean), self.terms)

    def scale(self) -> Float[np.ndarray, " K"]:
        """How much each term differs within a list, so that a step of 1 is a step in every direction."""
        count = self.there.sum(1)[:, None]
        mean = (self.terms * self.there[..., None]).sum(1) / count
        spread = (((self.terms - mean[:, None]) ** 2) * self.there[..., None]).sum((0, 1)) / self.there.sum()
        return np.where(spread > 0, np.sqrt(spread), 1.0)


def tune(
    development: Development, combination: Combination, rng: Rng, *, restarts: int = 8, progress: Progress = _SILENT
) -> dict[str, float]:
    """Find weights with few errors; the base's is reported as 1, or the largest where the base's is not above 0."""
    scale, start = development.scale(), combination.vector
    scaled = Development(development.terms / scale, development.errors, development.there, development.units)
    origin = start * scale  # in units of the spread, where all directions are alike
    size = float(np.linalg.norm(origin)) / len(origin) ** 0.5
    smooth = minimize(scaled.expected, origin, jac=True, method="L-BFGS-B").x
    starts = [origin, smooth]
    starts += [origin + size * rng.child("start", r).normal(len(origin)).numpy() for r in range(restarts)]
    found = []
    with progress.track("tuning weights", len(starts), "starts") as advance:
        for r, begin in enumerate(starts):
            found.append(_descended(scaled, begin, rng.child("directions", r)))
            advance(1)
    best = min(found, key=scaled.total) / scale  # the first of equals: from the weights given
    best = best / (best[0] if best[0] > 0 else np.abs(best).max())
    if not _fewer(development.total(best), development.total(start)):
        best = start
    return {name: float(weight) for name, weight in zip(combination.names, best, strict=True)}


def _descended(development: Development, weights: Float[np.ndarray, " K"], rng: Rng) -> Float[np.ndarray, " K"]:
    """Search lines through the weights until a whole round of them makes nothing better."""
    K, total = len(weights), development.total(weights)
    for around in range(_ROUNDS):
        before = total
        for direction in [*np.eye(K), *rng.child(around).normal(K, K).numpy()]:
            moved = weights + best_step(development, weights, direction) * direction
            if _fewer(development.total(moved), total):  # counted again: rounding may have moved a step
                weights, total = moved, development.total(moved)
        if total == before:
            break
    return weights


def best_step(development: Development, weights: Float[np.ndarray, " K"], direction: Float[np.ndarray, " K"]) -> float:
    """The γ of the best interval's middle, nearest to 0 of equals; at most 1 + |γ| behind its nearer end."""
    steps, totals = staircase(development, weights, direction)
    low, high = np.concatenate([[-np.inf], steps]), np.concatenate([steps, [np.inf]])
    wide = np.isinf(high - low) | (high - low > _ROUNDING * (1 + np.abs(low)))
    low, high, totals = low[wide], high[wide], totals[wide]
    if not _fewer(float(totals.min()), development.total(weights)):
        return 0.0
    best = np.flatnonzero(totals <= totals.min() + _ROUNDING)
    i = best[np.maximum(low[best], -high[best]).argmin()]
    near, sign = (low[i], 1.0) if -low[i] <= high[i] else (high[i], -1.0)
    return float(near + sign * min((high[i] - low[i]) / 2, 1 + abs(near)))


def _fewer(errors: float, than: float) -> bool:
    """By more than rounding."""
    return errors < than - _ROUNDING * (1 + abs(than))


def staircase(
    development: Development, weights: Float[np.ndarray, " K"], direction: Float[np.ndarray, " K"]
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S_and_1"]]:
    """Where errors change along a line, ascending; and the errors before the first such place and after each.

    All lists walk their envelopes at once: from the flattest line at γ = −∞ to the next that overtakes the leader.
    """
    there, errors = development.there, development.errors
    a, b = weighted(development.terms, weights), np.where(there, weighted(development.terms, direction), np.inf)
    rows = np.arange(len(a))
    least = b == b.min(1, keepdims=True)
    leader = np.where(least & there, a, -np.inf).argmax(1)
    start, places, changes = float(errors[rows, leader].sum()), [], []
    while True:
        steeper = there & (b > b[rows, leader][:, None])
        if not steeper.any():
            break
        gap = np.where(steeper, b - b[rows, leader][:, None], 1.0)
        cross = np.where(steeper, (a[rows, leader][:, None] - a) / gap, np.inf)
        place = cross.min(1)
        moving = np.isfinite(place)
        ahead = np.where((cross == place[:, None]) & steeper, b, -np.inf).argmax(1)
        changed = errors[rows, ahead] - errors[rows, leader]
        places.append(place[moving])
        changes.append(changed[moving])
        leader = np.where(moving, ahead, leader)
    all_places, all_changes = (np.concatenate([np.zeros(0), *parts]) for parts in (places, changes))
    order = all_places.argsort(kind="stable")
    totals = start + np.concatenate([[0.0], all_changes[order].cumsum()])
    return all_places[order], totals
