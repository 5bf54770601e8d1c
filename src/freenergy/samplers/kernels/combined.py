"""Kernels made of kernels: if P K_i = P for each, then P (Σ w_i K_i) = P and P (K_1 K_2 …) = P.

    KernelMixture:   one of them per step, chosen with probability w_i; reversible where they are
    Cycle:     all of them per step, in order; not reversible

The choice of a step is the same for all chains side by side, so that they are moved in one batch: each chain has the
law of the mixture, and given the choices chains are independent. ``TextMixture`` is the default for text: whole texts
from the base, and single tokens with the base's prediction from both sides. It is never far from the better of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Kernel, Model, Target
from freenergy.core.sequences import Continuations
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.kernels.metropolis_hastings import MetropolisHastings
from freenergy.samplers.kernels.proposals import Site, Suffix


@final
@dataclass(frozen=True, slots=True)
class CombinedState:
    """Where the chains are, and the state of the kernel that moved them last."""

    x: Continuations  # [1, chains]
    last: int = -1
    inner: Any = None

    @property
    def log_score(self) -> Float[Tensor, " chains"] | None:
        """The unnormalised log-density there, where the kernel that moved last knows it."""
        return getattr(self.inner, "log_score", None)


@final
@dataclass(frozen=True, slots=True)
class CombinedInfo:
    """What one step did: a chain has accepted where any kernel's proposal was taken."""

    is_accepted: Bool[Tensor, " chains"]
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMixture:
    """One kernel per step; even weights where none are given."""

    kernels: tuple[Kernel[Any], ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check(self.kernels)
        if self.weights is not None and (len(self.weights) != len(self.kernels) or min(self.weights) < 0):
            raise UserError(f"{len(self.kernels)} kernels have the weights {self.weights}: give one each, 0 or more")

    def init(self, target: Target[Model], x: Continuations) -> CombinedState:
        """Start chains at given positions [1, chains]."""
        return CombinedState(x)

    def step(self, target: Target[Model], state: CombinedState, rng: Rng) -> tuple[CombinedState, CombinedInfo]:
        """Choose a kernel and let it move every chain."""
        w = torch.ones(len(self.kernels)) if self.weights is None else torch.tensor(self.weights)
        i = int(rng.child("which").categorical(w.double().log()))
        return _moved(self.kernels, i, target, state, rng.child("kernel"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """All kernels per step, one after another, each ``times`` times."""

    kernels: tuple[Kernel[Any], ...]
    times: int = 1

    def __post_init__(self) -> None:
        _check(self.kernels)
        check_range(self, "times", at_least=1)

    def init(self, target: Target[Model], x: Continuations) -> CombinedState:
        """Start chains at given positions [1, chains]."""
        return CombinedState(x)

    def step(self, target: Target[Model], state: CombinedState, rng: Rng) -> tuple[CombinedState, CombinedInfo]:
        """Move every chain by each kernel in turn."""
        taken, tokens = torch.zeros(state.x.shape[1], dtype=torch.bool), 0
        for i in range(len(self.kernels)):
            for j in range(self.times):
                state, info = _moved(self.kernels, i, target, state, rng.child("kernel", i, j))
                taken, tokens = taken | info.is_accepted, tokens + info.base_tokens
        return state, CombinedInfo(taken, tokens)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextMixture:
    """Whole texts from the base with probability ``whole``, else one token from both sides or an ending."""

    whole: float = 0.5
    local: Literal["cloze", "causal", "uniform", "suffix"] = "cloze"

    def __post_init__(self) -> None:
        check_range(self, "whole", above=0, below=1)

    @property
    def kernel(self) -> KernelMixture:
        """What one step does."""
        proposal = Suffix() if self.local == "suffix" else Site(by=self.local)
        kernels = (Independence(law="model"), MetropolisHastings(proposal=proposal))
        return KernelMixture(kernels=kernels, weights=(self.whole, 1 - self.whole))

    def init(self, target: Target[Model], x: Continuations) -> CombinedState:
        """Start chains at given positions [1, chains]."""
        return self.kernel.init(target, x)

    def step(self, target: Target[Model], state: CombinedState, rng: Rng) -> tuple[CombinedState, CombinedInfo]:
        """Choose a kernel and let it move every chain."""
        return self.kernel.step(target, state, rng)


def _moved(
    kernels: Sequence[Kernel[Any]], i: int, target: Target[Model], state: CombinedState, rng: Rng
) -> tuple[CombinedState, CombinedInfo]:
    """Move by kernel i; its state is still right where it was the last to move."""
    inner = state.inner if state.last == i else kernels[i].init(target, state.x)
    after, info = kernels[i].step(target, inner, rng)
    return CombinedState(after.x, i, after), CombinedInfo(info.is_accepted, info.base_tokens)


def _check(kernels: Sequence[Kernel[Any]]) -> None:
    if not kernels:
        raise UserError("a combination of no kernels was asked for: give at least one")
