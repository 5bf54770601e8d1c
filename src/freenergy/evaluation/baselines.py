"""Other language models on the same windows as the base and the residual model.

A baseline is a normalised language model, so its perplexity needs no bounds. What the residual model is worth shows
next to one that had the same parameters and compute: where even its certificate loses, the verdict says so.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.perplexity import Counts, Measurement


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
