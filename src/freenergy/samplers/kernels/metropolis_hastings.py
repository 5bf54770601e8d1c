"""Metropolis–Hastings with any proposal.

    x' ~ q(· | x),      r = min(1, P(x') q(x | x') / (P(x) q(x' | x))),      move to x' with probability r, else stay

Detailed balance holds whatever q is, since P(x) q(x'|x) r(x, x') = min(P(x) q(x'|x), P(x') q(x|x')) is the same both
ways; Z cancels. A chain may start where the density is zero; from there it takes any proposal.
"""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.samplers.accept import accept, acceptance, move
from freenergy.samplers.kernels.sites import log_scores


@final
@dataclass(frozen=True, slots=True)
class Proposed:
    """Where each chain would go, log q(x | x') − log q(x' | x), and the tokens that the base has drawn for it."""

    x: Continuations
    log_ratio: Float[Tensor, " chains"]
    base_tokens: int = 0


@runtime_checkable
class Proposal(Protocol):
    """q(x' | x): how a move is proposed. Frozen settings; chain n draws from candidate n of the stream."""

    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Propose one move per chain."""


@final
@dataclass(frozen=True, slots=True)
class MetropolisHastingsState:
    """Where the chains are, and the unnormalised log-density there."""

    x: Continuations  # [1, chains]
    log_score: Float[Tensor, " chains"]


@final
@dataclass(frozen=True, slots=True)
class MetropolisHastingsInfo:
    """What one step did."""

    is_accepted: Bool[Tensor, " chains"]
    acceptance: Float[Tensor, " chains"]  # the probability with which each was accepted
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetropolisHastings:
    """Chains that move by ``proposal``, corrected so that the target is invariant."""

    proposal: Proposal

    def init(self, target: Target[Model], x: Continuations) -> MetropolisHastingsState:
        """Start chains at given positions [1, chains]."""
        return MetropolisHastingsState(x, log_scores(target, x))

    def step(
        self, target: Target[Model], state: MetropolisHastingsState, rng: Rng
    ) -> tuple[MetropolisHastingsState, MetropolisHastingsInfo]:
        """Propose once for every chain, and accept or stay; ``rng`` is this step's own."""
        found = self.proposal.propose(target, state.x, rng.child("draw"))
        now, new = state.log_score, log_scores(target, found.x)
        log_ratio = torch.where(new == -torch.inf, -torch.inf, new - now + found.log_ratio)
        r = acceptance(torch.where(now == -torch.inf, 0.0, log_ratio))
        is_accepted = accept(r, rng.child("accept"))
        after = MetropolisHastingsState(move(is_accepted, found.x, state.x), torch.where(is_accepted, new, now))
        return after, MetropolisHastingsInfo(is_accepted, r, found.base_tokens)
