"""How much better one model is than another on the same text: paired bootstrap over documents.

    percent = 100 · (1 − exp(−G)),      G = Σ_d (log A_d − log B_d) / Σ_d t_d      nats per token

Both models read the same windows, so what makes a window hard for both falls out of the difference. A resample draws D
of the D documents with replacement and computes G again. With few documents the spread of resamples is too narrow: by
√((D − 1)/D), and by the normal tails where Student's t has wider ones. Both are corrected by taking wider quantiles
of the resamples (Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 5.3):

    from α = Φ(−√(D/(D − 1)) · t_{97.5 %, D − 1})   to   1 − α

No resample lies beyond the best and the worst document, and all D documents are on one side of the truth once in
2^(D − 1): with fewer than six that alone is more than 5 %, so the interval is then the linearised one with Student's t.

The interval of the residual model's gain is not made here: ``certified`` takes the linearised t interval of the same
paired differences. It needs no random numbers, it exists at any D ≥ 2, and the gain per sequence is a mean, for
which both agree. Between two language models, whose difference per token is less near to normal, the resamples follow
the shape of it.
"""

import math

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import ndtr, stdtrit  # scipy.stats takes a second to import

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import CONFIDENCE, Measurement, measured_percent, percent_less

_BATCH_SIZE = 2_000_000  # document numbers drawn at a time
FEWEST = 6  # documents whose resamples can reach as far as a 95 % interval does


def paired_bootstrap(
    a: Float[np.ndarray, " W"],
    b: Float[np.ndarray, " W"],
    tokens: Float[np.ndarray, " W"],
    documents: Integer[np.ndarray, " W"],
    rng: Rng,
    resamples: int = 10_000,
) -> Measurement:
    """How much lower the perplexity of a is than that of b, in percent, with its 95 % interval.

    ``a`` and ``b`` are log-probabilities of the same windows, which stand in these documents.
    """
    if resamples < 100:
        raise UserError(f"{resamples} resamples are too few for an interval: ask for 100 or more")
    d = np.unique(documents, return_inverse=True)[1]
    gain, t = np.bincount(d, a - b), np.bincount(d, tokens)
    D = len(t)
    if D < FEWEST:
        return measured_percent(gain, t)
    G = np.concatenate([resampled(gain, t, size, rng) for size in in_parts(resamples, D)])
    low, high = np.quantile(G, ends_of(D)).tolist()
    return Measurement(percent_less(float(gain.sum() / t.sum())), percent_less(low), percent_less(high))


def resampled(
    gain: Float[np.ndarray, " D"], t: Float[np.ndarray, " D"], size: int, rng: Rng
) -> Float[np.ndarray, " size"]:
    """G of ``size`` resamples."""
    D = len(t)
    chosen = (rng.uniform(size, D).numpy() * D).astype(np.int64)
    return np.asarray(gain[chosen].sum(1) / t[chosen].sum(1))


def in_parts(resamples: int, D: int) -> list[int]:
    """Sizes that sum to the number of resamples, each within memory."""
    most = max(1, _BATCH_SIZE // D)
    return [min(most, resamples - first) for first in range(0, resamples, most)]


def ends_of(D: int) -> tuple[float, float]:
    """The shares of resamples between which the interval lies."""
    t = float(stdtrit(D - 1, (1 + CONFIDENCE) / 2))
    alpha = float(ndtr(-math.sqrt(D / (D - 1)) * t))
    return alpha, 1 - alpha
