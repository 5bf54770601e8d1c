"""How much better one model is than another on the same text: paired bootstrap over documents.

    percent = 100 · (1 − exp(−G)),      G = Σ_d (log A_d − log B_d) / Σ_d t_d      nats per token

Both models read the same windows, so what makes a window hard for both falls out of the difference. A resample draws D
of the D documents with replacement and computes G again. With few documents the spread of resamples is too narrow: by
√((D − 1)/D), and by the normal tails where Student's t has wider ones. Both are corrected by taking wider quantiles
of the resamples (Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 5.3):

    from α = Φ(−√(D/(D − 1)) · t_{97.5 %, D − 1})   to   1 − α

No resample lies beyond the best and the worst document, and all D documents are on one side of the truth once in
2^(D − 1): with fewer than six that alone is more than 5 %, so the interval is then the linearised one with Student's t.
The gain of the residual model, a mean per sequence, has the linearised interval too (``certified``).

A baseline is a normalised language model, so its perplexity needs no bounds. What the residual model is worth shows
next to one that had the same parameters and compute: where even its certificate loses, the verdict says so.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import ndtr, stdtrit  # scipy.stats takes a second to import

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import CONFIDENCE, Counts, Measurement, measured_percent, percent_less

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
    G = resampled(gain, t, resamples, rng)
    low, high = np.quantile(G, ends_of(D)).tolist()
    return Measurement(percent_less(float(gain.sum() / t.sum())), percent_less(low), percent_less(high))


def resampled(
    gain: Float[np.ndarray, " D"], t: Float[np.ndarray, " D"], resamples: int, rng: Rng
) -> Float[np.ndarray, " resamples"]:
    """G of each resample, in parts that fit into memory."""
    D, found = len(t), []
    most = max(1, _BATCH_SIZE // D)
    for first in range(0, resamples, most):
        chosen = (rng.uniform(min(most, resamples - first), D).numpy() * D).astype(np.int64)
        found.append(gain[chosen].sum(1) / t[chosen].sum(1))
    return np.concatenate(found)


def ends_of(D: int) -> tuple[float, float]:
    """The shares of resamples between which the interval lies."""
    t = float(stdtrit(D - 1, (1 + CONFIDENCE) / 2))
    alpha = float(ndtr(-math.sqrt(D / (D - 1)) * t))
    return alpha, 1 - alpha


class Compared(NamedTuple):
    """Log-probabilities of the same W windows by a baseline and by what it is compared with."""

    baseline: Float[np.ndarray, " W"]
    other: Float[np.ndarray, " W"]
    counts: Counts

    def percent(self, rng: Rng) -> Measurement:
        """How much lower the baseline's perplexity is than the other's."""
        return paired_bootstrap(self.baseline, self.other, self.counts.token, self.counts.documents, rng)


def compare(against_base: Compared, against_joint: Compared | None, rng: Rng) -> dict[str, Any]:
    """Report on one baseline; ``against_joint`` holds the certified log-probabilities of the residual model."""
    counts, log_p = against_base.counts, against_base.baseline
    token, word, byte = (counts.perplexity(log_p, unit) for unit in ("token", "word", "byte"))
    of_base = against_base.percent(rng.child("base"))
    found: dict[str, Any] = {
        "perplexity": token.value,
        "interval": token.interval,
        "per_word": word.value,
        "per_byte": byte.value,
        "against_base": {"percent": of_base.value, "interval": of_base.interval},
        "verdict": "",
    }
    if against_joint is not None:
        of_joint = against_joint.percent(rng.child("joint"))
        found["against_joint"] = {"percent": of_joint.value, "interval": of_joint.interval}
        found["verdict"] = _verdict(of_joint)
    return found


def _verdict(less: Measurement) -> str:
    """Say which is better: ``less`` is how far the baseline's perplexity is below the certified one."""
    if less.value is None or less.low is None or less.high is None:
        return "there is too little text to compare it with the residual model"
    if less.low > 0:
        return f"the residual model loses to it: perplexity is {less.value:.1f} % lower than the certified one"
    if less.high < 0:
        return f"the residual model is better: perplexity is {-less.value:.1f} % higher than the certified one"
    return "no difference from the residual model's certified perplexity is shown"
