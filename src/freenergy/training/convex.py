"""Fit linear energies to their optimum.

    min over w, b of   objective(E(data), E(negatives)) + l2 · ‖w‖² / 2,      E = E_0 − Σ_parts w · z − b

NCE and its relatives are convex in E and E is linear in (w, b), so L-BFGS in float64 finds the one optimum, with no
learning rate and no randomness. Autograd goes through the objective alone, g = ∂objective / ∂E of [M, 1 + K] numbers;
∂/∂w = −zᵀ g + l2 · w is a matrix product.

Objectives are means over windows, so value and slope are sums over chunks of windows, each weighted by its share of M.
Features [M, 1 + K, F] come in ``Pieces``; with a ``scratch`` folder z stands on disk, and no array grows with M × F.

Legend: M windows, K negatives of each. Where windows are read at several cuts, each cut of each is a row of its own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.optimize import minimize
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.roles import Objective
from freenergy.energies.features import FeatureEnergy
from freenergy.partition.certificate import certified_gain
from freenergy.training.contrastive_batches import scores_of
from freenergy.training.feature_cache import Pieces, laid_flat

Offset = Float[Tensor, "_ _"]  # [M, 1 + K]
_ITERATIONS = 1000
_BATCH_SIZE = 1 << 22  # features that an evaluation has before it: 16 or 32 MB


class Fit(NamedTuple):
    """How the fit went."""

    iterations: int
    value: float  # of the objective with its penalty
    converged: bool


class Choice(NamedTuple):
    """The penalty that held-out text prefers."""

    l2: float
    gain: float
    fit: Fit
    table: list[tuple[float, float]]  # (l2, certified gain on held-out windows in nats per window)


def fit_convex(
    parts: Sequence[FeatureEnergy],
    features: Sequence[Pieces],
    objective: Objective,
    l2: float,
    offset: Offset | None = None,
    *,
    scratch: Path | None = None,
) -> Fit:
    """Set μ, σ, w and b of the parts to the optimum; ``offset`` is E_0 of [data, negatives], 0 where None.

    b is fitted in the first part alone, and stays 0 where the objective does not see a constant added to all energies.
    """
    problem = _Problem(parts, features, objective, offset, scratch)
    fit, at = problem.solve(l2, np.zeros(problem.size))
    problem.keep(at)
    return fit


def choose_l2(
    parts: Sequence[FeatureEnergy],
    features: Sequence[Pieces],
    held_out: Sequence[Pieces],
    objective: Objective,
    grid: Sequence[float],
    offset: Offset | None = None,
    held_out_offset: Offset | None = None,
    *,
    scratch: Path | None = None,
) -> Choice:
    """Fit with each penalty, strongest first, each from where the last one ended; keep the best on held-out windows."""
    problem = _Problem(parts, features, objective, offset, scratch)
    at, table, fits = np.zeros(problem.size), [], []
    for l2 in sorted(grid, reverse=True):
        fit, at = problem.solve(l2, at)
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
    features: Sequence[Pieces],
    objective: Objective,
    l2: float,
    offset: Offset | None = None,
    *,
    folds: int = 4,
    cuts: int = 1,
    scratch: Path | None = None,
) -> Float[Tensor, "M candidates"]:
    """Compute Σ_parts E of each window by parts that were fitted without it; the parts themselves stay as they are.

    This is what the parts are worth on text that they have not seen, and so what is left for another energy to learn.
    With several ``cuts`` every window appears once per cut, and all cuts of a window are left out together.
    """
    kept = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    rows, candidates, _ = features[0].shape
    windows = rows // cuts
    fold = (torch.arange(windows) % folds).repeat(cuts)
    E = torch.zeros(rows, candidates, dtype=torch.float64)
    for k in range(min(folds, windows) if windows > 1 else 0):  # one window alone has no others to learn from
        others, own = fold != k, fold == k
        some = [each.some(others) for each in features]
        fit_convex(parts, some, objective, l2, None if offset is None else offset[others], scratch=scratch)
        E[own] = joint_energy(parts, [each.some(own) for each in features])
    for part, state in zip(parts, kept, strict=True):
        part.load_state_dict(state)
    return E


@torch.no_grad()
def joint_energy(parts: Sequence[FeatureEnergy], features: Sequence[Pieces]) -> Float[Tensor, "M candidates"]:
    """Compute Σ_parts E of the data (first column) and the negatives."""
    columns = [
        torch.cat([part.energy_of(piece).cpu() for piece in each]) for part, each in zip(parts, features, strict=True)
    ]
    return torch.stack(columns).sum(0)


@final
class _Problem:
    """The function of (w of each part, b) that is made small."""

    def __init__(
        self,
        parts: Sequence[FeatureEnergy],
        features: Sequence[Pieces],
        objective: Objective,
        offset: Offset | None,
        scratch: Path | None = None,
    ) -> None:
        if not parts or len(parts) != len(features):
            raise UserError(f"{len(parts)} energies and features for {len(features)}: give features for each energy")
        self.parts, self.objective, self.offset = parts, objective, offset
        self.rows, self.columns, _ = features[0].shape
        self.z: list[np.ndarray] = []  # of each part [M, 1 + K, F]
        for part, pieces in zip(parts, features, strict=True):
            wanted = (self.rows, self.columns, len(part.names))
            if pieces.shape != wanted:
                raise UserError(
                    f"the features of {type(part).__name__} have shape {pieces.shape} and not {wanted}: compute those "
                    "of every part for the same windows and negatives"
                )
            part.fit_scale(pieces)
            self.z.append(laid_flat(map(part.standardised, pieces), pieces.shape, scratch))
        self.bounds = np.cumsum([0, *(z.shape[2] for z in self.z)])
        self.size = int(self.bounds[-1]) + 1
        # a ranking objective does not see a constant, and rounding would move b
        self.has_bias = abs(self._value_at(1.0) - self._value_at(0.0)) > 1e-9

    def solve(self, l2: float, start: Float64[np.ndarray, " size"]) -> tuple[Fit, Float64[np.ndarray, " size"]]:
        """Minimise by L-BFGS from ``start``."""
        if not l2 >= 0:
            raise UserError(f"l2 is {l2}: set it to 0 or more")
        # features in float32 give slopes with an error of some 1e-6, and a search for a better zero would fail
        slope, gain = (1e-7, 1e-13) if all(z.dtype == np.float64 for z in self.z) else (1e-5, 1e-10)
        options = {"maxiter": _ITERATIONS, "maxcor": 30, "gtol": slope, "ftol": gain, "maxfun": 2 * _ITERATIONS}
        found = minimize(self.value_and_slope, start, args=(l2,), jac=True, method="L-BFGS-B", options=options)
        return Fit(int(found.nit), float(found.fun), bool(found.success)), found.x

    def value_and_slope(
        self, at: Float64[np.ndarray, " size"], l2: float
    ) -> tuple[float, Float64[np.ndarray, " size"]]:
        """Return the objective with its penalty, and its gradient: one pass over z."""
        w, b = at[:-1], at[-1]
        value, gradient = 0.0, np.zeros(self.size)
        for some in self._chunks():
            z = [each[some] for each in self.z]
            logit = sum(each @ part.astype(each.dtype) for each, part in zip(z, self._split(w), strict=True))
            energy = (self._offset(some) - torch.from_numpy(np.asarray(logit, dtype=np.float64)) - b).requires_grad_()
            loss = self._loss(energy)
            (slope,) = torch.autograd.grad(loss, energy)
            g = -slope.numpy().ravel()
            by_part = [each.reshape(len(g), -1).T @ g.astype(each.dtype) for each in z]
            value += float(loss.detach())
            gradient += np.concatenate([*by_part, [g.sum() * self.has_bias]])
        gradient[:-1] += l2 * w
        return value + l2 * float(w @ w) / 2, gradient

    def keep(self, at: Float64[np.ndarray, " size"]) -> None:
        """Write the solution into the parts."""
        with torch.no_grad():
            for i, (part, w) in enumerate(zip(self.parts, self._split(at[:-1]), strict=True)):
                part.weight.copy_(torch.from_numpy(w))
                part.bias.fill_(float(at[-1]) if i == 0 else 0.0)

    def _split(self, w: Float64[np.ndarray, " F"]) -> list[np.ndarray]:
        return [w[i:j] for i, j in zip(self.bounds[:-1], self.bounds[1:], strict=True)]

    def _chunks(self) -> Iterator[slice]:
        """Yield windows whose features are read together."""
        step = max(1, _BATCH_SIZE // (self.columns * (self.size - 1)))
        return (slice(first, min(first + step, self.rows)) for first in range(0, self.rows, step))

    def _offset(self, some: slice) -> Float[Tensor, "chunk candidates"]:
        if self.offset is None:
            return torch.zeros(some.stop - some.start, self.columns, dtype=torch.float64)
        return self.offset[some].double().cpu()

    def _loss(self, energy: Float[Tensor, "chunk candidates"]) -> Float[Tensor, ""]:
        """Return the part of the objective that these windows have."""
        return self.objective(*scores_of(energy)).value * (len(energy) / self.rows)

    def _value_at(self, constant: float) -> float:
        """Return the objective where every energy is the offset and a constant."""
        return sum(float(self._loss(self._offset(some) + constant)) for some in self._chunks())
