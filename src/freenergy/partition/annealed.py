"""log Z by annealed importance sampling, from below and from above.

    p_β ∝ f(x, β),   0 = β_0 < β_1 < … < β_K = 1,   p_0 can be drawn and Z_0 is known,   T_β leaves p_β invariant
    forward:   x_0 ~ p_0,       x_k ~ T_{β_k}(x_{k−1}),       log w = Σ_{k<K} log f(x_k, β_{k+1}) − log f(x_k, β_k)
    reverse:   x_{K−1} ~ p_1,   x_{k−1} ~ T̃_{β_k}(x_k),       the same sum;      T̃ is T backwards

    E[w] = Z_1/Z_0 forward,   E[1/w] = Z_0/Z_1 in reverse      (Neal 2001; Grosse, Ghahramani and Adams 2015)
    E[log mean w]  ≤  log Z_1/Z_0  ≤  E[−log mean 1/w]         at any number of chains and temperatures

A single forward estimate is above log Z by one nat with probability below 1/e, a reverse one below it likewise, so the
two bracket log Z where their distance says how far to trust either. The reverse side needs exact draws of the target:
from a model whose sums are exact, from data that the model itself has made, or approximately from long chains.

For a text target p_β = P_LM · exp(−β E)/Z_β: the base is β = 0, and any kernel of tokens moves the chains.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Energy, Kernel, Model, Target
from freenergy.core.sequences import Continuations
from freenergy.energies.call import energies_in_batches
from freenergy.models.residual import Residual, residual_of
from freenergy.partition.estimate import LogPartition
from freenergy.partition.weights import log_partition

X = TypeVar("X")


@runtime_checkable
class AnnealingPath(Protocol[X]):
    """Densities f(x, β) from one that can be drawn to the one whose log Z is asked for; x holds all chains."""

    @property
    def log_partition_start(self) -> float:
        """log Z_0."""

    def start(self, num: int, rng: Rng) -> X:
        """Draw ``num`` chains from p_0, exactly."""

    def log_increase(self, x: X, low: float, high: float) -> Float[Tensor, " chains"]:
        """log f(x, high) − log f(x, low) of each chain."""

    def step(self, x: X, beta: float, rng: Rng, *, backward: bool) -> X:
        """Move every chain once, leaving p_β invariant; ``backward`` asks for the reversed move."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AnnealedBounds:
    """log Z between a forward estimate from below and a reverse one from above; both have one row."""

    forward: LogPartition
    reverse: LogPartition  # of 1/w, so log Z is minus its lower estimate

    @property
    def lower(self) -> float:
        """A stochastic lower bound: below log Z in expectation."""
        return float(self.forward.lower)

    @property
    def upper(self) -> float:
        """A stochastic upper bound: above log Z in expectation."""
        return -float(self.reverse.lower)

    @property
    def gap(self) -> float:
        """upper − lower: how far either side can be off."""
        return self.upper - self.lower

    def verdict(self) -> str:
        """Return why the two should not be believed, or an empty string."""
        error = 3 * math.hypot(float(self.forward.standard_error), float(self.reverse.standard_error))
        if self.gap > max(0.5, error):
            return f"the two sides are {self.gap:.2g} nats apart: take more temperatures, or a kernel that moves more"
        if -self.gap > max(0.05, error):
            return f"the sides cross by {-self.gap:.2g} nats: the draws of the target are not draws of it"
        return ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """β_k = (k/K)^power, k = 0 … K."""

    temperatures: int = 64  # K
    power: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, "temperatures", at_least=1)
        check_range(self, "power", above=0)

    def betas(self) -> list[float]:
        """Return β_0 … β_K.

        >>> Schedule(temperatures=4).betas()
        [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        return [(k / self.temperatures) ** self.power for k in range(self.temperatures + 1)]


def anneal(
    path: AnnealingPath[X], schedule: Schedule, num: int, rng: Rng, progress: Progress = SILENT
) -> tuple[Float[Tensor, " chains"], X]:
    """Run forward: return log w of each chain and the state of all at β_{K−1}, a draw of about p_1."""
    betas, x = schedule.betas(), path.start(num, rng.child("start"))
    log_w = torch.zeros(num, dtype=torch.float64)
    with progress.track("annealing", float(len(betas) - 1), "temperatures") as advance:
        for k in range(len(betas) - 1):
            if k:
                x = path.step(x, betas[k], rng.child("step", k), backward=False)
            log_w += path.log_increase(x, betas[k], betas[k + 1]).double().cpu()
            advance(1.0)
    return log_w, x


def anneal_back(
    path: AnnealingPath[X], schedule: Schedule, x: X, rng: Rng, progress: Progress = SILENT
) -> Float[Tensor, " chains"]:
    """Run in reverse from draws of p_1: return log w of each chain."""
    betas, total = schedule.betas(), list[Tensor]()
    with progress.track("annealing back", float(len(betas) - 1), "temperatures") as advance:
        for k in range(len(betas) - 2, -1, -1):
            total.append(path.log_increase(x, betas[k], betas[k + 1]).double().cpu())
            if k:
                x = path.step(x, betas[k], rng.child("back", k), backward=True)
            advance(1.0)
    return torch.stack(total).sum(0)


def annealed_bounds(
    path: AnnealingPath[X], draws: X, *, chains: int, rng: Rng, schedule: Schedule | None = None,
    progress: Progress = SILENT,
) -> AnnealedBounds:  # fmt: skip
    """Bracket log Z: forward with ``chains`` chains, and in reverse from ``draws`` of the target."""
    schedule = schedule or Schedule()
    forward, _ = anneal(path, schedule, chains, rng.child("forward"), progress)
    reverse = anneal_back(path, schedule, draws, rng.child("reverse"), progress)
    start = path.log_partition_start
    return AnnealedBounds(
        forward=log_partition((forward + start).unsqueeze(0)), reverse=log_partition((-reverse - start).unsqueeze(0))
    )


@final
@dataclass(frozen=True, slots=True)
class TextPath:
    """P_LM · exp(−β E) on the one context of a target, moved by a reversible kernel of tokens."""

    target: Target[Model]
    kernel: Kernel[Any]
    moves: int = 1  # steps of the kernel per temperature

    @property
    def log_partition_start(self) -> float:
        """log Z of the base, which is normalised."""
        return 0.0

    def start(self, num: int, rng: Rng) -> Continuations:
        """Draw from the base."""
        return residual_of(self.target).base.sample(self.target.contexts, num, self.target.space, rng).x.to("cpu")

    @torch.no_grad()
    def log_increase(self, x: Continuations, low: float, high: float) -> Float[Tensor, " chains"]:
        """−(high − low) · E(x)."""
        E = energies_in_batches(residual_of(self.target).energy, x, allow_inf=True)
        return -(high - low) * E[0]

    @torch.no_grad()
    def step(self, x: Continuations, beta: float, rng: Rng, *, backward: bool) -> Continuations:
        """Move by the kernel on the base with β times the energy."""
        model = residual_of(self.target)
        warm = Target(Residual(model.base, scaled(model.energy, beta)), self.target.contexts, self.target.space)
        state = self.kernel.init(warm, x)
        for i in range(self.moves):
            state, _ = self.kernel.step(warm, state, rng.child("move", i))
        moved: Continuations = state.x
        return moved


def scaled(energy: Energy, beta: float) -> Energy:
    """Return β · E; +inf stays so at any β above 0."""

    def times(x: Continuations) -> Tensor:
        return beta * energy(x)

    return times


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Annealed:
    """E[Ẑ] = Z by ``chains`` annealed chains per context; ``kernel`` names what moves them (``samplers.KERNELS``).

    >>> from freenergy.testing import World
    >>> world = World(spread=2.0)
    >>> found = Annealed(chains=400)(world.target(), Rng(0))
    >>> abs(found.lower.item() - world.log_partition()) < 0.2
    True
    """

    chains: int = 256
    schedule: Schedule = Schedule()
    kernel: str = "independence"
    moves: int = 1

    def __post_init__(self) -> None:
        check_range(self, "chains", at_least=2)
        check_range(self, "moves", at_least=1)

    def path(self, target: Target[Model]) -> TextPath:
        """Return the path from the base to a target with one context."""
        from freenergy.core.registry import configured
        from freenergy.samplers.registry import KERNELS  # here, since samplers import the estimates of log Z

        return TextPath(target, configured(KERNELS.find(self.kernel), {}, f"the kernel {self.kernel}"), self.moves)

    def __call__(self, target: Target[Model], rng: Rng) -> LogPartition:
        """Estimate log Z of each context from below."""
        if not len(target):
            raise UserError("log Z of no contexts was asked for: give at least one")
        rows = [
            anneal(self.path(target[b : b + 1]), self.schedule, self.chains, rng.shift(contexts=b))[0]
            for b in range(len(target))
        ]
        return log_partition(torch.stack(rows))

    def bounds(self, target: Target[Model], draws: Continuations, rng: Rng) -> AnnealedBounds:
        """Bracket log Z of one context, given exact draws [1, n] of the target."""
        if len(target) != 1 or draws.shape[0] != 1 or draws.shape[1] < 2:
            raise UserError("both sides of log Z need one context and at least two draws of its target: give these")
        path = self.path(target)
        return annealed_bounds(path, draws, chains=self.chains, rng=rng, schedule=self.schedule)
