"""A score of a corpus as a function of sums over its sentences, and how sure it is.

    score = f(Σ_i s_i),      difference = f(Σ_i Σ_r a_ir) − f(Σ_i Σ_r b_ir)

s_i is what sentence i adds: for BLEU its n-grams, those of them that match, and two lengths; for a mean its value and a
one. r runs over seeds: a sentence stands with its translations by all the networks of a system, so f is the score of
their outputs put together. A resample draws N of the N sentences with replacement, with all that belongs to each, for
both systems alike (Koehn 2004); quantiles as in ``evaluation.bootstrap``. That interval is about other sentences, for
these networks. The variation between seeds is in the experiment's own interval over seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float

from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import FEWEST, ends_of
from freenergy.evaluation.perplexity import Measurement

RESAMPLES = 1000  # sacrebleu's default


@final
@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The statistics s of N sentences, and the score f of their sum."""

    values: Float[np.ndarray, "N d"]
    score: Callable[[np.ndarray], float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def value(self) -> float:
        """The score of the corpus."""
        return self.score(self.values.sum(0))

    def only(self, rows: Sequence[int]) -> "Statistics":
        """Select some of the sentences."""
        return Statistics(self.values[list(rows)], self.score)

    @staticmethod
    def together(parts: "Sequence[Statistics]") -> "Statistics":
        """Pool several corpora of the same sentences: per sentence the sum over corpora."""
        return Statistics(np.sum([part.values for part in parts], axis=0), parts[0].score)


def ratio_of(amount: Float[np.ndarray, " N"], count: Float[np.ndarray, " N"], times: float = 1.0) -> Statistics:
    """times · Σ amount / Σ count."""
    return Statistics(np.stack([amount, count], axis=1), lambda total: float(times * total[0] / max(total[1], 1e-300)))


def difference(
    ours: Sequence[Statistics], others: Sequence[Statistics], rng: Rng, resamples: int = RESAMPLES
) -> Measurement:
    """Return ours − others over all seeds, with the 95 % interval over sentences; none if there are too few."""
    a, b = Statistics.together(ours), Statistics.together(others)
    gap, N = a.value - b.value, len(a)
    if N < FEWEST:
        return Measurement(gap, None, None)
    chosen = (rng.uniform(resamples, N).numpy() * N).astype(np.int64)
    gaps = [a.score(a.values[rows].sum(0)) - b.score(b.values[rows].sum(0)) for rows in chosen]
    low, high = np.quantile(gaps, ends_of(N)).tolist()
    return Measurement(gap, low, high)
