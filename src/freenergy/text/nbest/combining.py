"""Scores of several models as one.

    s = λ_base · log_base − λ_energy · E + Σ_k λ_k · score_k + λ_length · tokens

With weights 1, 1 and 0 for the length, and no other scores, s is the residual model's log_score. Only the ratios of the
weights matter to what is chosen. A candidate that the residual model forbids (probability zero) is never chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np
from jaxtyping import Float

from freenergy.core.errors import UserError
from freenergy.text.nbest.nbest import NBest
from freenergy.text.ranking import Ranking


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
