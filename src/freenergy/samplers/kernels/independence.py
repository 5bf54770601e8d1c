"""Metropolis with an independent proposal.

    x' ~ q(· | c),      move to x' with probability min(1, w(x')/w(x)),      else stay;      w = P/q up to a constant

The target is invariant, since P(x) · q(x') · min(1, w'/w) = q(x) q(x') · min(w, w')/Z is the same both ways. A chain
may start where the weight is zero; from there it takes any proposal.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.sample_only import relative_log_prob
from freenergy.lm.token_log_probs import log_proposal
from freenergy.models.residual import residual_of
from freenergy.samplers.accept import accept, acceptance


@final
@dataclass(frozen=True, slots=True)
class IndependenceState:
    """Where the chains are, with the weights that the next step compares."""

    at: Scored  # [1, chains]

    @property
    def x(self) -> Continuations:
        """The positions."""
        return self.at.x

    @property
    def log_score(self) -> Float[Tensor, " chains"]:
        """The unnormalised log-density there."""
        return self.at.log_score[0]


@final
@dataclass(frozen=True, slots=True)
class IndependenceInfo:
    """What one step did."""

    is_accepted: Bool[Tensor, " chains"]
    log_weight: Float[Tensor, " chains"]  # of the proposals
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Independence:
    """Proposals from the base, or from the base tempered and truncated."""

    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"

    def init(self, target: Target[Model], x: Continuations) -> IndependenceState:
        """Start chains at given positions [1, chains]."""
        model = residual_of(target)
        log_base = relative_log_prob(model.base, x)
        log_q = log_base if self.truncation.is_identity else log_proposal(model.base, x, self.truncation)
        draws = Draws(x, log_base, log_q)
        return IndependenceState(model.weigh(draws, truncation=self.truncation, law=self.law))

    def step(
        self, target: Target[Model], state: IndependenceState, rng: Rng
    ) -> tuple[IndependenceState, IndependenceInfo]:
        """Propose once for every chain, and accept or stay; ``rng`` is this step's own."""
        return self.move(state, self.propose(target, state.at.num, rng), rng)

    def propose(self, target: Target[Model], num: int, rng: Rng) -> Scored:
        """The proposals of one step, one per chain; of several steps where the target repeats the context."""
        model = residual_of(target)
        return model.propose(
            target.contexts, num, target.space, rng.child("draw"),
            truncation=self.truncation, law=self.law, batch_size=num * len(target),
        )  # fmt: skip

    def move(self, state: IndependenceState, proposal: Scored, rng: Rng) -> tuple[IndependenceState, IndependenceInfo]:
        """Accept or stay, chain by chain."""
        now, new = state.at.log_weight[0], proposal.log_weight[0]
        is_accepted = accept(acceptance(torch.where(now == -torch.inf, 0.0, new - now)), rng.child("accept"))
        K = len(now)
        at = Scored.cat([state.at, proposal], dim=1).take(torch.arange(K) + K * is_accepted)
        return IndependenceState(at), IndependenceInfo(is_accepted, new, proposal.tokens_drawn)
