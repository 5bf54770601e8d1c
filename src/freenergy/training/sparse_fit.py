"""Fit sparse linear potentials to their optimum: the twin of ``convex`` for a weight per pattern.

    U(x) = λ · f(x) + b,        min over λ, b of   loss(U(data), U(noise)) + l2 · ‖λ‖² / 2

    noise-contrastive    loss = mean_D log(1 + ν e^{−U}) + ν · mean_B log(1 + e^{U} / ν)         (U = log p / q)
    likelihood           loss = − mean_D U + log mean_B e^{U}                                     (importance weights)

Both are convex, so L-BFGS finds the one optimum. f are sparse matrices [R, F] in float32; weights, sums and slopes are
float64. ``likelihood`` is maximum likelihood with the self-normalised importance-sampling gradient
E_D f − Σ_B e^{U} f / Σ_B e^{U}: it trusts the draws that it has, so they flatter its log Z.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, final

import numpy as np
from jaxtyping import Float64
from safetensors.numpy import load_file, save_file
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit, logsumexp

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write
from freenergy.core.progress import SILENT, Advance, Progress, raise_if_stop_requested

Vector = Float64[np.ndarray, " _"]
Losses = Literal["noise-contrastive", "likelihood"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFitSettings:
    """How sparse weights are fitted, and which penalties are tried."""

    loss: Losses = "noise-contrastive"
    l2: tuple[float, ...] = (3e-3, 1e-3, 3e-4)  # tried from the strongest on, as long as fresh draws bear it
    iterations: int = 60  # of L-BFGS, for each penalty
    least_ess: float = 0.01  # share of fresh draws that must count, or a penalty is too weak

    def __post_init__(self) -> None:
        check_range(self, "iterations", at_least=1)
        check_range(self, "least_ess", at_least=0, below=1)
        if not self.l2 or not all(each >= 0 and math.isfinite(each) for each in self.l2):
            raise UserError(f"l2 is {list(self.l2)}: give one penalty or more, each 0 or above")


class Slopes(NamedTuple):
    """A loss, and its slope by each potential."""

    value: float
    data: Vector
    noise: Vector


def noise_contrastive(data: Vector, noise: Vector, nu: float, draws: int) -> Slopes:
    """Return the binary loss at noise ratio ν, where potentials are log p − log q.

    >>> round(noise_contrastive(np.zeros(1), np.zeros(2), 1.0, 2).value / math.log(2), 6)
    2.0
    """
    shift = math.log(nu)
    value = np.logaddexp(0, shift - data).mean() + nu * np.logaddexp(0, noise - shift).sum() / draws
    return Slopes(float(value), -expit(shift - data) / len(data), nu * expit(noise - shift) / draws)


def importance_likelihood(data: Vector, noise: Vector, nu: float, draws: int) -> Slopes:
    """Return minus the log-likelihood with log Z estimated on the noise; ν does not matter."""
    log_z = float(logsumexp(noise)) - math.log(draws)
    weights = np.exp(noise - log_z) / draws
    return Slopes(log_z - float(data.mean()), np.full(len(data), -1 / len(data)), weights)


_LOSSES: dict[Losses, Callable[[Vector, Vector, float, int], Slopes]] = {
    "noise-contrastive": noise_contrastive,
    "likelihood": importance_likelihood,
}


@final
class SparseProblem:
    """The function of (λ, b) that is made small; offsets are potentials that stay as they are.

    ``draws`` counts all draws of the noise: those that are not among the rows have weight 0 in the model, so they add
    nothing to the loss but to the number that its mean divides by.
    """

    def __init__(
        self,
        data: csr_matrix,
        noise: csr_matrix,
        loss: Losses = "noise-contrastive",
        *,
        offsets: tuple[Vector, Vector] | None = None,
        noise_ratio: float | None = None,
        draws: int | None = None,
    ) -> None:
        if data.shape[1] != noise.shape[1] or not data.shape[0] or not noise.shape[0]:
            raise UserError(f"features of data {data.shape} and noise {noise.shape}: give some of both, of one kind")
        self.data, self.noise, self.loss = data, noise, _LOSSES[loss]
        self.offsets = offsets or (np.zeros(data.shape[0]), np.zeros(noise.shape[0]))
        self.draws = draws or noise.shape[0]
        self.nu = noise_ratio or self.draws / data.shape[0]
        self.size = data.shape[1] + 1
        self._turned = data.T, noise.T

    def potentials(self, at: Vector) -> tuple[Vector, Vector]:
        """Return U of data and noise, offsets included."""
        weights, bias = at[:-1].astype(np.float32), at[-1]
        found = (matrix @ weights for matrix in (self.data, self.noise))
        data, noise = (
            offset + values.astype(np.float64) + bias for offset, values in zip(self.offsets, found, strict=True)
        )
        return data, noise

    def value_and_slope(self, at: Vector, l2: float) -> tuple[float, Vector]:
        """Return the loss with its penalty, and its gradient by (λ, b)."""
        data, noise = self.potentials(at)
        found = self.loss(data, noise, self.nu, self.draws)
        slope = l2 * at
        slope[-1] = found.data.sum() + found.noise.sum()
        for turned, part in zip(self._turned, found[1:], strict=True):
            # slopes are near 1 / R, below what float32 adds well: they are scaled to 1 and back
            slope[:-1] += (turned @ (part * len(part)).astype(np.float32)).astype(np.float64) / len(part)
        return found.value + l2 * float(at[:-1] @ at[:-1]) / 2, slope

    def solve(self, l2: float, start: Vector, iterations: int, advance: Advance | None = None) -> tuple[Vector, float]:
        """Return the optimum (λ, b) for one penalty and its loss."""

        def step(at: Vector) -> None:
            raise_if_stop_requested()
            if advance is not None:
                advance(1)

        options = {"maxiter": iterations, "maxcor": 10, "gtol": 1e-7, "ftol": 1e-9, "maxfun": 2 * iterations}
        found = minimize(
            self.value_and_slope, start, args=(l2,), jac=True, method="L-BFGS-B", options=options, callback=step
        )
        if not np.isfinite(found.x).all():
            raise UserError("the fit has diverged: raise l2")
        return found.x, float(found.fun)


class Tried(NamedTuple):
    """A penalty, its training loss, and what held-out text and fresh draws say of it."""

    l2: float
    loss: float
    gain: float  # certified nats per sentence on held-out text
    ess: float  # effective draws among the fresh ones
    draws: int


class Chosen(NamedTuple):
    """The weights that were kept, and all penalties that were tried."""

    weights: Vector
    bias: float
    l2: float
    tried: list[Tried]


Judge = Callable[[Vector, float], tuple[float, float, int]]  # (λ, b) → gain, effective draws, draws; all held out


def choose_penalty(
    problem: SparseProblem,
    settings: SparseFitSettings,
    judge: Judge,
    progress: Progress = SILENT,
    checkpoints: Path | None = None,
) -> Chosen:
    """Fit with each penalty, strongest first, each from where the last ended; keep the best certified gain.

    A weaker penalty is not tried once fresh draws have shown too few effective ones, or less gain: over-fitting ruins
    log Z first, while the loss on the training draws still falls. A finished penalty is kept in ``checkpoints``, from
    where a killed fit resumes with the same bits.
    """
    at, tried, kept = np.zeros(problem.size), list[Tried](), list[Vector]()
    grid = sorted(settings.l2, reverse=True)
    with progress.track("fit", len(grid) * settings.iterations, "iterations") as advance:
        for l2 in grid:
            found = _read(checkpoints, l2)
            if found is None:
                at, loss = problem.solve(l2, at, settings.iterations, advance)
                found = at, Tried(l2, loss, *judge(at[:-1], float(at[-1])))
                _write(checkpoints, *found)
            at, result = found
            tried.append(result)
            kept.append(at)
            is_worse = len(tried) > 1 and result.gain < tried[-2].gain
            if is_worse or result.ess < settings.least_ess * result.draws:
                break
    best = best_of(tried, settings.least_ess)
    return Chosen(kept[best][:-1], float(kept[best][-1]), tried[best].l2, tried)


def best_of(tried: Sequence[Tried], least_ess: float) -> int:
    """Return which penalty to keep: the most certified gain among those whose fresh draws count, or the strongest.

    >>> best_of([Tried(3e-3, 1.2, 0.9, 900.0, 1000), Tried(1e-3, 1.1, 1.3, 30.0, 10_000)], 0.01)
    0
    """
    able = [i for i, each in enumerate(tried) if each.ess >= least_ess * each.draws]
    return max(able or [0], key=lambda i: tried[i].gain)


def _path(folder: Path, l2: float) -> Path:
    return folder / f"penalty-{l2:g}.safetensors"


def _write(folder: Path | None, at: Vector, tried: Tried) -> None:
    if folder is not None:
        with atomic_write(_path(folder, tried.l2)) as aside:
            save_file({"at": at, "tried": np.array(tried, dtype=np.float64)}, aside)


def _read(folder: Path | None, l2: float) -> tuple[Vector, Tried] | None:
    if folder is None or not _path(folder, l2).is_file():
        return None
    arrays = load_file(_path(folder, l2))
    l2, loss, gain, ess, draws = arrays["tried"].tolist()
    return arrays["at"], Tried(l2, loss, gain, ess, int(draws))
