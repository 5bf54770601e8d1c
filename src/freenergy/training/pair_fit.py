"""Exact maximum likelihood of a field of pairs, by length.

    max over θ of  Σ_x [U(x) − log Z_{l(x)}] / N − l2 · ‖θ − θ_0‖² / 2

The gradient is the data's features less the expected ones at the same lengths. Both are exact, so L-BFGS needs no
draws. θ_0 is where the fit starts: a bigram model (``PairField.from_ngram``). From zero it would
need hundreds of iterations.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress, raise_if_stop_requested
from freenergy.core.sentences import Sentences
from freenergy.models.transfer import PairField


class PairFit(NamedTuple):
    """The fitted field, and how the fit went."""

    field: PairField
    iterations: int
    log_likelihood: float  # nats per sentence given its length, without the penalty


def fit_pairs(
    field: PairField, text: Sentences, *, l2: float, iterations: int = 15, progress: Progress = SILENT
) -> PairFit:
    """Fit all weights around those that the field has."""
    if not l2 >= 0 or iterations < 1:
        raise UserError(f"l2 is {l2} and iterations {iterations}: set l2 to 0 or more, iterations to 1 or more")
    num = np.bincount(text.lengths, minlength=field.longest + 1)[1:].astype(np.float64)
    data, start, N = field.counts(text).flat(), field.weights.flat(), text.num

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        raise_if_stop_requested()
        log_z, expected = field.with_weights(field.unflat(at)).expected(num)
        away = at - start
        value = (log_z - data @ at) / N + l2 * float(away @ away) / 2
        return value, (expected.flat() - data) / N + l2 * away

    with progress.track("exact fit", iterations, "iterations") as advance:
        found = minimize(
            loss, start, jac=True, method="L-BFGS-B", callback=lambda at: advance(1),
            options={"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 10},
        )  # fmt: skip
    fitted = field.with_weights(field.unflat(found.x))
    away = found.x - start
    return PairFit(fitted, int(found.nit), -float(found.fun) + l2 * float(away @ away) / 2)
