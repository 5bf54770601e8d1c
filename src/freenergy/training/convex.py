"""Fit linear energies to their optimum.

    min over w, b of   objective(E(data), E(negatives)) + l2 · ‖w‖² / 2,      E = E_0 − Σ_parts w · z − b

NCE and its relatives are convex in E and E is linear in (w, b), so L-BFGS in float64 finds the one optimum, with no
learning rate and no randomness. Autograd goes through the objective alone, g = ∂objective / ∂E of [M, 1 + K] numbers;
∂/∂w = −zᵀ g + l2 · w is a matrix product.

Legend: M windows, K negatives of each. Where windows are read at several cuts, each cut of each is a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.optimize import minimize
from torch import Tensor

from freenergy.energies.features import FeatureEnergy
from freenergy.errors import UserError
from freenergy.partition.certificate import certified_gain
from freenergy.protocols import Objective, Scores

Features = tuple[Float[Tensor, "_ 1 _"], Float[Tensor, "_ _ _"]]  # of the data [M, 1, F] and the negatives [M, K, F]
Offset = Float[Tensor, "_ _"]  # [M, 1 + K]
_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """How the fit went."""

    iterations: int
    value: float  # of the objective with its penalty
    converged: bool


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The penalty that held-out text prefers."""

    l2: float
    gain: float
    fit: Fit
    table: list[tuple[float, float]]  # (l2, certified gain on held-out windows in nats a window)


def fit_convex(
    parts: Sequence[FeatureEnergy],
    features: Sequence[Features],
    objective: Objective,
    l2: float,
    offset: Offset | None = None,
    *,
    iterations: int = 1000,
) -> Fit:
    """Set μ, σ, w and b of the parts to the optimum; ``offset`` is E_0 of [data, negatives], 0 where None.

    b is fitted in the first part alone, and stays 0 where the objective does not see a constant added to all energies.
    """
    problem = _Problem(parts, features, objective, offset)
    fit, at = problem.solve(l2, np.zeros(problem.size), iterations)
    problem.keep(at)
    return fit


def choose_l2(
    parts: Sequence[FeatureEnergy],
    features: Sequence[Features],
    held_out: Sequence[Features],
    objective: Objective,
    grid: Sequence[float] = _GRID,
    offset: Offset | None = None,
    held_out_offset: Offset | None = None,
    *,
    iterations: int = 1000,
) -> Choice:
    """Fit with each penalty, strongest first, each from where the last one ended; keep the best on held-out windows."""
    problem = _Problem(parts, features, objective, offset)
    at, table, fits = np.zeros(problem.size), [], []
    for l2 in sorted(grid, reverse=True):
        fit, at = problem.solve(l2, at, iterations)
        problem.keep(at)
        energy = joint_energy(parts, held_out)
        energy = energy if held_out_offset is None else energy + held_out_offset
        gain = float(certified_gain(energy[:, :1], energy[:, 1:]).mean())
        table.append((l2, gain))
        fits.append((gain, l2, fit, at))
    gain, l2, fit, at = max(fits, key=lambda row: row[0])
    problem.keep(at)
    return Choice(l2, gain, fit, table)


def cross_fitted(
    parts: Sequence[FeatureEnergy],
    features: Sequence[Features],
    objective: Objective,
    l2: float,
    offset: Offset | None = None,
    *,
    folds: int = 4,
    cuts: int = 1,
) -> Float[Tensor, "M candidates"]:
    """Σ_parts E of each window by parts that were fitted without it; the parts themselves stay as they are.

    This is what the parts are worth on text that they have not seen, and so what is left for another energy to learn.
    With several ``cuts`` the windows stand there so many times over, and all cuts of a window are left out together.
    """
    kept = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    windows = len(features[0][0]) // cuts
    fold = (torch.arange(windows) % folds).repeat(cuts)
    E = torch.zeros(len(fold), features[0][0].shape[1] + features[0][1].shape[1], dtype=torch.float64)
    for k in range(min(folds, windows) if windows > 1 else 0):  # one window alone has no others to learn from
        others, own = fold != k, fold == k
        some = [(data[others], negatives[others]) for data, negatives in features]
        fit_convex(parts, some, objective, l2, None if offset is None else offset[others])
        E[own] = joint_energy(parts, [(data[own], negatives[own]) for data, negatives in features]).cpu()
    for part, state in zip(parts, kept, strict=True):
        part.load_state_dict(state)
    return E


@torch.no_grad()
def joint_energy(parts: Sequence[FeatureEnergy], features: Sequence[Features]) -> Float[Tensor, "M candidates"]:
    """Σ_parts E of the data (first column) and the negatives."""
    columns = [
        torch.cat([part.energy_of(data), part.energy_of(negatives)], dim=1)
        for part, (data, negatives) in zip(parts, features, strict=True)
    ]
    return torch.stack(columns).sum(0)


@final
class _Problem:
    """The function of (w of each part, b) that is made small."""

    def __init__(
        self,
        parts: Sequence[FeatureEnergy],
        features: Sequence[Features],
        objective: Objective,
        offset: Offset | None,
    ) -> None:
        if not parts or len(parts) != len(features):
            raise UserError(f"{len(parts)} energies and features for {len(features)}: give features for each energy")
        self.parts, self.objective = parts, objective
        self.z: list[np.ndarray] = []  # of each part [M, 1 + K, F]
        for part, both in zip(parts, features, strict=True):
            _check(part, both, features[0])
            part.fit_scale(*both)
            self.z.append(part.standardised(torch.cat(both, dim=1)).cpu().numpy())
        M, columns, _ = self.z[0].shape
        self.offset = torch.zeros(M, columns, dtype=torch.float64) if offset is None else offset.double().cpu()
        self.bounds = np.cumsum([0, *(z.shape[2] for z in self.z)])
        self.size = int(self.bounds[-1]) + 1
        # a ranking objective does not see a constant, and rounding would move b
        self.has_bias = abs(self._value(self.offset + 1) - self._value(self.offset)) > 1e-9

    def solve(
        self, l2: float, start: Float64[np.ndarray, " size"], iterations: int
    ) -> tuple[Fit, Float64[np.ndarray, " size"]]:
        """L-BFGS from ``start``."""
        if not l2 >= 0:
            raise UserError(f"l2 is {l2}: set it to 0 or more")
        # features in float32 give slopes with an error of some 1e-6, and a search for a better zero would fail
        slope, gain = (1e-7, 1e-13) if all(z.dtype == np.float64 for z in self.z) else (1e-5, 1e-10)
        options = {"maxiter": iterations, "maxcor": 30, "gtol": slope, "ftol": gain, "maxfun": 2 * iterations}
        found = minimize(self.value_and_slope, start, args=(l2,), jac=True, method="L-BFGS-B", options=options)
        return Fit(int(found.nit), float(found.fun), bool(found.success)), found.x

    def value_and_slope(
        self, at: Float64[np.ndarray, " size"], l2: float
    ) -> tuple[float, Float64[np.ndarray, " size"]]:
        """The objective with its penalty, and its gradient."""
        w, b = at[:-1], at[-1]
        logit = sum(z @ part.astype(z.dtype) for z, part in zip(self.z, self._split(w), strict=True))
        energy = (self.offset - torch.from_numpy(np.asarray(logit, dtype=np.float64)) - b).requires_grad_()
        value = self.objective(Scores(energy[:, :1]), Scores(energy[:, 1:])).value
        (slope,) = torch.autograd.grad(value, energy)
        g = -slope.numpy().ravel()
        by_part = [z.reshape(len(g), -1).T @ g.astype(z.dtype) for z in self.z]
        gradient = np.concatenate([*by_part, [g.sum() * self.has_bias]]).astype(np.float64)
        gradient[:-1] += l2 * w
        return float(value.detach()) + l2 * float(w @ w) / 2, gradient

    def keep(self, at: Float64[np.ndarray, " size"]) -> None:
        """Write the solution into the parts."""
        with torch.no_grad():
            for i, (part, w) in enumerate(zip(self.parts, self._split(at[:-1]), strict=True)):
                part.weight.copy_(torch.from_numpy(w))
                part.bias.fill_(float(at[-1]) if i == 0 else 0.0)

    def _split(self, w: Float64[np.ndarray, " F"]) -> list[np.ndarray]:
        return [w[i:j] for i, j in zip(self.bounds[:-1], self.bounds[1:], strict=True)]

    def _value(self, energy: Float[Tensor, "M candidates"]) -> float:
        return float(self.objective(Scores(energy[:, :1]), Scores(energy[:, 1:])).value)


def _check(part: FeatureEnergy, features: Features, first: Features) -> None:
    """Features of the same windows and negatives for every part, one number for each of its weights."""
    wanted = [(*block.shape[:2], len(part.names)) for block in first]
    found = [tuple(block.shape) for block in features]
    if found != wanted:
        raise UserError(
            f"the features of {type(part).__name__} have shapes {found} and not {wanted}: compute those of every part "
            "for the same windows and negatives"
        )
