"""π, the law of sentence lengths of a trans-dimensional random field.

    π_l ∝ Σ_k n_k · K_h(l − k) + floor,        l = 1 … m,        Σ_l π_l = 1

n_k counts training sentences of k words and K_h is a Gaussian kernel, so that a length between two seen ones is not
impossible. Maximum likelihood of π alone is n_l / N (``smooth = 0``, ``floor = 0``).
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float64, Integer

from freenergy.core.errors import UserError


@final
@dataclass(frozen=True, slots=True, eq=False)
class LengthLaw:
    """Probabilities of 1 … m words.

    >>> law = LengthLaw.fit(np.array([2, 2, 3]), longest=4)
    >>> round(float(law.probs.sum()), 12), int(law.probs.argmax()) + 1
    (1.0, 2)
    """

    probs: Float64[np.ndarray, " m"]

    def __post_init__(self) -> None:
        if not len(self.probs) or (self.probs < 0).any() or abs(float(self.probs.sum()) - 1) > 1e-9:
            raise UserError("the probabilities of lengths do not sum to one: divide them by their sum")

    @classmethod
    def fit(
        cls, lengths: Integer[np.ndarray, " N"], *, longest: int, smooth: float = 1.5, floor: float = 0.02
    ) -> "LengthLaw":
        """Count lengths 1 … ``longest``; others are refused."""
        if not len(lengths) or lengths.min() < 1 or lengths.max() > longest:
            raise UserError(f"lengths must be 1 … {longest}, and some must be given: leave other sentences out")
        counts = np.bincount(lengths, minlength=longest + 1)[1:].astype(np.float64)
        if smooth > 0:
            at = np.arange(longest)
            kernel = np.exp(-0.5 * ((at[:, None] - at) / smooth) ** 2)
            counts = (kernel / kernel.sum(0)) @ counts
        counts += floor
        return cls(counts / counts.sum())

    @property
    def longest(self) -> int:
        """The largest number of words, m."""
        return len(self.probs)

    def log_prob(self, lengths: Integer[np.ndarray, " R"]) -> Float64[np.ndarray, " R"]:
        """Return log π of each length; −inf outside of 1 … m."""
        padded = np.concatenate([[0.0], self.probs, [0.0]])
        at = np.where((lengths < 0) | (lengths > self.longest), 0, lengths)
        with np.errstate(divide="ignore"):
            found: Float64[np.ndarray, " R"] = np.log(padded[at])
        return found
