"""Maximum likelihood of log-linear models whose sums are exact, which is maximum entropy.

    p_θ ∝ exp(θ · f),      max_θ  θ · F − log Z(θ) − λ/2 |θ|²,      F = mean of f over the data
    at the maximum with λ = 0:   E_p f = F, and no other law with these moments has more entropy

``fit_by_gradient`` climbs by L-BFGS with the exact gradient F − E_p f − λθ. ``fit_by_scaling`` is improved iterative
scaling (Della Pietra et al. 1997): δ_k solves

    Σ_l E_p[f_k ; l] · exp(δ_k M_l) = F_k,        M_l ≥ Σ_k f_k(x) for words of l letters

which raises the likelihood at every step and needs no step size. The model has weights θ, ``counts``,
``log_partitions`` per length and ``log_prob``.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.sequences import Continuations
from freenergy.models.spelling import SpellingModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFit:
    """How a fit ended: the mean log-likelihood of the data in nats per word, and the largest gap of moments."""

    log_likelihood: float
    moment_gap: float  # max |F − E_p f − λθ|: 0 at the maximum
    steps: int
    history: list[float]  # of the objective, one number per step


def fit_by_gradient(
    model: SpellingModel,
    x: Continuations,
    *,
    l2: float = 0.0,
    max_steps: int = 500,
    tolerance: float = 1e-9,
    progress: Progress = SILENT,
) -> ExactFit:
    """Set the weights to the maximum-likelihood ones of words [1, N], with λ = ``l2``."""
    if l2 < 0:
        raise UserError(f"l2 is {l2}: set it to 0 or more")
    F, lengths = model.counts(x) / x.shape[1], _lengths(model, x)
    history: list[float] = []
    with progress.track("fitting", float(max_steps), "steps") as advance:

        def seen(intermediate_result: Any) -> None:  # scipy asks for this name
            history.append(-float(intermediate_result.fun))
            advance(1.0)

        start = model.weights.detach().cpu().numpy()
        options = {"maxiter": max_steps, "gtol": tolerance, "ftol": 1e-15, "maxcor": 20}
        found = minimize(
            lambda values: _objective(model, F, lengths, l2, values),
            start, jac=True, method="L-BFGS-B", options=options, callback=seen,
        )  # fmt: skip
    with torch.no_grad():
        model.weights.copy_(torch.from_numpy(found.x))
    return _ended(model, x, float(np.abs(found.jac).max()), history)


def fit_by_scaling(
    model: SpellingModel, x: Continuations, *, steps: int = 100, progress: Progress = SILENT
) -> ExactFit:
    """Take steps of improved iterative scaling; every one raises the likelihood of words [1, N]."""
    F, lengths = model.counts(x) / x.shape[1], _lengths(model, x)
    if (F == 0).any():
        raise UserError(
            "a feature never occurs in the words: its weight has no maximum; leave it out or fit by gradient with l2"
        )
    M = model.order * torch.arange(2, model.max_length + 2, dtype=torch.float64)  # n features per place, end included
    history: list[float] = []
    with progress.track("scaling", float(steps), "steps") as advance:
        for _ in range(steps):
            expected = _expected_per_length(model, lengths)
            with torch.no_grad():
                model.weights.add_(_scaling_steps(expected, F, M))
            history.append(-_objective(model, F, lengths, 0.0, model.weights.detach().cpu().numpy())[0])
            advance(1.0)
    gap = float((F - _expected_per_length(model, lengths).sum(0)).abs().max())
    return _ended(model, x, gap, history)


def _ended(model: SpellingModel, x: Continuations, gap: float, history: list[float]) -> ExactFit:
    with torch.no_grad():
        value = float(model.log_prob(x).mean())
    return ExactFit(log_likelihood=value, moment_gap=gap, steps=len(history), history=history)


def _lengths(model: SpellingModel, x: Continuations) -> Float[Tensor, " m"] | None:
    """Return the law of lengths in the data where the normaliser is per length, else None."""
    if model.normaliser == "global":
        return None
    counts = torch.bincount(x.lengths[0] - 2, minlength=model.max_length)
    return counts.double() / x.shape[1]


def _log_normaliser(model: SpellingModel, lengths: Float[Tensor, " m"] | None) -> Float[Tensor, ""]:
    """Return log Z, or Σ_l (share of l in the data) · log Z_l: what the data's mean score is compared with."""
    log_z = model.log_partitions()
    return log_z.logsumexp(0) if lengths is None else (lengths * log_z).sum()


def _objective(
    model: SpellingModel, F: Tensor, lengths: Tensor | None, l2: float, values: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the objective to minimise and its gradient at these weights."""
    with torch.no_grad():
        model.weights.copy_(torch.from_numpy(values))
    value = _log_normaliser(model, lengths) - F @ model.weights + l2 / 2 * model.weights.square().sum()
    return float(value.detach()), torch.autograd.grad(value, model.weights)[0].numpy()


def _expected_per_length(model: SpellingModel, lengths: Tensor | None) -> Float[Tensor, "m F"]:
    """E_p[f ; l], one row per length: P(l) times the gradient of log Z_l."""
    log_z = model.log_partitions()
    share = (log_z - log_z.logsumexp(0)).exp().detach() if lengths is None else lengths
    rows = [torch.autograd.grad(log_z[i], model.weights, retain_graph=True)[0] for i in range(len(log_z))]
    return share.unsqueeze(1) * torch.stack(rows)


def _scaling_steps(
    expected: Float[Tensor, "m F"], F: Float[Tensor, " F"], M: Float[Tensor, " m"]
) -> Float[Tensor, " F"]:
    """Solve Σ_l expected_l · e^{δ M_l} = F for every feature, by Newton's method on the log of both sides."""
    log_e, log_f = expected.clamp(min=1e-300).log(), F.log()
    delta = (log_f - log_e.logsumexp(0)) / M.max()
    for _ in range(60):
        terms = log_e + delta * M.unsqueeze(1)
        total = terms.logsumexp(0)
        slope = ((terms - total).exp() * M.unsqueeze(1)).sum(0)
        move = (log_f - total) / slope
        delta = delta + move
        if float(move.abs().max()) < 1e-13:
            break
    return delta
