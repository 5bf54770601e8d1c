"""Langevin and Hamiltonian dynamics on real-valued states: unadjusted, adjusted, with noisy gradients.

    Langevin:   x' = x + (σ²/2) ∇ log p(x) + σ ε,   ε ~ N(0, I)                               (Eq. 2.23 of Ou 2024)
    adjusted:   accepted by min(1, p(x') q(x | x') / (p(x) q(x' | x))),   q(x' | x) the Gaussian of this step: MALA
    SGLD:       x' = x + δ_t Δ(x) + √(2 δ_t) ε,   E[Δ(x)] = ∇ log p(x),   δ_t = δ_0 (1 + t/offset)^(−decay)

The adjusted step leaves p invariant. The unadjusted one does not: on N(0, 1) its variance is 1/(1 − σ²/4), and that of
SGLD with constant δ and gradient noise of variance s² is (2 + δ s²)/(2 − δ); the bias goes away with the step size.
Positions are ``Soft`` [1, chains]: embeddings of tokens, or plain points (``points``). Chain n owns its noise.
"""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Sequences, Soft
from freenergy.samplers.accept import accept_at, acceptance


@runtime_checkable
class Density(Protocol):
    """A density of real-valued states, known up to a constant; it has gradients with respect to ``x.values``."""

    def log_score(self, x: Soft) -> Float[Tensor, "batch num"]:
        """log p(x) + a constant."""


@runtime_checkable
class NoisyDensity(Protocol):
    """A density whose gradient is estimated, as from a subsample of the data (scaled by all/subsample)."""

    def noisy_gradient(self, x: Soft, rng: Rng) -> Float[Tensor, "chains length D"]:
        """An unbiased estimate of ∇ log p(x), fresh at every call."""


def points(values: Float[Tensor, "chains D"]) -> Soft:
    """Return points of R^D as positions of chains.

    >>> points(torch.zeros(3, 2)).shape
    (1, 3)
    """
    K = len(values)
    lengths = torch.ones(1, K, dtype=torch.long, device=values.device)
    return Soft(Sequences.from_lists([[]]), values.view(1, K, 1, -1), lengths, form="embeddings")


@final
@dataclass(frozen=True, slots=True)
class RealState:
    """Where the chains are, with log-density and gradient there; ``time`` counts steps."""

    x: Soft  # [1, chains]
    log_score: Float[Tensor, " chains"]
    gradient: Float[Tensor, "chains length D"]
    time: int = 0

    @property
    def values(self) -> Float[Tensor, "chains length D"]:
        """The positions as numbers."""
        return self.x.values[0]


@final
@dataclass(frozen=True, slots=True)
class RealInfo:
    """What one step did; without a correction every proposal is taken."""

    is_accepted: Bool[Tensor, " chains"]
    acceptance: Float[Tensor, " chains"]
    base_tokens: int = 0


def evaluated(target: Density, x: Soft, time: int = 0) -> RealState:
    """Return the state at these positions: one reading of the density with its gradient."""
    values = x.values.detach().requires_grad_()
    with torch.enable_grad():
        log_score = target.log_score(_at(x, values))[0]
        (gradient,) = torch.autograd.grad(log_score.sum(), values)
    if not log_score.isfinite().all():
        n = int((~log_score.isfinite()).nonzero()[0])
        raise UserError(
            f"chain {n} is where the log-density is {log_score[n].item()}: start elsewhere, or lower step_size"
        )
    return RealState(_at(x, values.detach()), log_score.detach(), gradient[0], time)


def _at(x: Soft, values: Float[Tensor, "1 chains length D"]) -> Soft:
    return Soft(x.contexts, values, x.lengths, form=x.form)


def moved(state: RealState, values: Float[Tensor, "chains length D"]) -> Soft:
    """Return other positions of the same chains."""
    return _at(state.x, values.unsqueeze(0))


def chosen(is_accepted: Bool[Tensor, " chains"], new: RealState, old: RealState) -> RealState:
    """Return the new position of every chain that accepts, and the old one of the others."""
    wide = is_accepted.view(-1, 1, 1)
    values = torch.where(wide, new.values, old.values)
    gradient = torch.where(wide, new.gradient, old.gradient)
    log_score = torch.where(is_accepted, new.log_score, old.log_score)
    return RealState(moved(old, values), log_score, gradient, new.time)


def noise(state: RealState, rng: Rng) -> tuple[Float[Tensor, "chains length D"], Float[Tensor, " chains"]]:
    """Return standard normal numbers and a uniform one for the coin, each chain's from its own stream."""
    K, L, D = state.values.shape
    rows = rng.rows(1, K, L * D + 1)
    return rows.normal(L * D).view(K, L, D).to(state.values), rows.uniforms(1)[0, :, 0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Langevin:
    """Step size σ; ``is_adjusted`` makes it MALA, which leaves the density invariant."""

    step_size: float = 0.5
    is_adjusted: bool = True

    def __post_init__(self) -> None:
        check_range(self, "step_size", above=0)

    def init(self, target: Density, x: Soft) -> RealState:
        """Start chains at given positions [1, chains]."""
        return evaluated(target, x)

    def step(self, target: Density, state: RealState, rng: Rng) -> tuple[RealState, RealInfo]:
        """Follow the gradient with noise; accept or stay where the step is adjusted."""
        s2, (eps, u) = self.step_size**2, noise(state, rng.child("draw"))
        values = state.values + s2 / 2 * state.gradient + self.step_size * eps
        new = evaluated(target, moved(state, values), state.time + 1)
        if not self.is_adjusted:
            everyone = torch.ones(len(values), dtype=torch.bool)
            return new, RealInfo(everyone, everyone.double())
        back = (state.values - values - s2 / 2 * new.gradient).square().sum((1, 2)) / (2 * s2)
        forth = eps.square().sum((1, 2)) / 2
        r = acceptance((new.log_score - state.log_score + forth - back).double().cpu())
        is_accepted = accept_at(r, u)
        return chosen(is_accepted.to(values.device), new, state), RealInfo(is_accepted, r)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SGLD:
    """Steps δ_t that shrink with ``decay`` (0.5 < decay ≤ 1 for convergence, 0 for a constant step with its bias)."""

    step_size: float = 0.1
    decay: float = 0.55
    offset: float = 10.0

    def __post_init__(self) -> None:
        check_range(self, "step_size", "offset", above=0)
        check_range(self, "decay", at_least=0, at_most=1)

    def init(self, target: Density, x: Soft) -> RealState:
        """Start chains at given positions [1, chains]."""
        return evaluated(target, x)

    def delta(self, time: int) -> float:
        """δ_t.

        >>> SGLD(step_size=0.2, decay=0.0).delta(100)
        0.2
        """
        return float(self.step_size * (1 + time / self.offset) ** -self.decay)

    def step(self, target: Density, state: RealState, rng: Rng) -> tuple[RealState, RealInfo]:
        """Follow a fresh estimate of the gradient, with noise; nothing is rejected."""
        delta, gradient = self.delta(state.time), state.gradient
        if isinstance(target, NoisyDensity):
            gradient = target.noisy_gradient(state.x, rng.child("gradient"))
        values = state.values + delta * gradient + (2 * delta) ** 0.5 * noise(state, rng.child("draw"))[0]
        everyone = torch.ones(len(values), dtype=torch.bool)
        return evaluated(target, moved(state, values), state.time + 1), RealInfo(everyone, everyone.double())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HamiltonianMonteCarlo:
    """Leapfrog trajectories of ``leaps`` steps of size ε, accepted by the change of total energy.

    p ~ N(0, I);   p ← p + ε/2 ∇ log p(x),  x ← x + ε p,  p ← p + ε/2 ∇ log p(x)   ``leaps`` times;
    accepted by min(1, exp(log p(x') − |p'|²/2 − log p(x) + |p|²/2)). One leap is MALA with σ = ε.
    """

    step_size: float = 0.3
    leaps: int = 8

    def __post_init__(self) -> None:
        check_range(self, "step_size", above=0)
        check_range(self, "leaps", at_least=1)

    def init(self, target: Density, x: Soft) -> RealState:
        """Start chains at given positions [1, chains]."""
        return evaluated(target, x)

    def step(self, target: Density, state: RealState, rng: Rng) -> tuple[RealState, RealInfo]:
        """Draw momenta, follow the trajectory, accept or stay."""
        start, u = noise(state, rng.child("draw"))
        momentum, new = start, state
        for _ in range(self.leaps):
            momentum = momentum + self.step_size / 2 * new.gradient
            new = evaluated(target, moved(new, new.values + self.step_size * momentum), state.time + 1)
            momentum = momentum + self.step_size / 2 * new.gradient
        kinetic = (start.square() - momentum.square()).sum((1, 2)) / 2
        r = acceptance((new.log_score - state.log_score + kinetic).double().cpu())
        is_accepted = accept_at(r, u)
        return chosen(is_accepted.to(start.device), new, state), RealInfo(is_accepted, r)
