"""Metropolis within Gibbs: one token at a time, proposed by the base from what stands before it.

    t ~ Uniform{1 … L},      v ~ q(· | c, x_<t),      x' = x with x_t = v
    move with probability min(1, P(x') q(x_t | c, x_<t) / (P(x) q(v | c, x_<t))),      else stay

Site and proposal do not depend on the token that is replaced, so P is invariant site by site. A step reads L tokens per
chain where ``independence`` draws L, and moves by one: it suits energies under which whole proposals are rarely taken.
Only for spaces of one length, since replacing EOS would change it.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel, Model, Target
from freenergy.core.sequences import Continuations, Sequences
from freenergy.core.truncation import Truncation
from freenergy.models.residual import residual_of
from freenergy.samplers.accept import accept, acceptance, move


@final
@dataclass(frozen=True, slots=True)
class SingleSiteState:
    """Where the chains are, and the unnormalised log-density there."""

    x: Continuations  # [1, chains]
    log_score: Float[Tensor, " chains"]


@final
@dataclass(frozen=True, slots=True)
class SingleSiteInfo:
    """What one step did."""

    is_accepted: Bool[Tensor, " chains"]
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SingleSite:
    """A random site per step and chain; ``temperature`` flattens what the base proposes for it."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)

    def init(self, target: Target[Model], x: Continuations) -> SingleSiteState:
        """Start chains at given positions [1, chains]."""
        if target.space.eos is not None:
            raise UserError(
                "single-site replaces tokens of texts of one length, and these may end early: choose another sampler"
            )
        return SingleSiteState(x, residual_of(target).scored(x, allow_inf=True).log_score[0])

    def step(self, target: Target[Model], state: SingleSiteState, rng: Rng) -> tuple[SingleSiteState, SingleSiteInfo]:
        """Propose another token at one site of every chain, and accept or stay."""
        (_, K), x, rows = state.x.shape, state.x, rng.child("draw").rows(1, state.x.shape[1], 2)
        site = rows.categorical(torch.zeros(1, K, target.space.length))[0]
        log_q = self._proposal(residual_of(target).base, x, site)
        token = rows.categorical(log_q.unsqueeze(0))[0]
        place = site.view(1, K, 1)
        old = x.tokens.gather(2, place).flatten()
        moved = Continuations(x.contexts, x.tokens.scatter(2, place, token.view(1, K, 1)), x.lengths)
        proposed, now = self.init(target, moved).log_score, state.log_score
        log_ratio = proposed - now + (log_q.gather(1, old.unsqueeze(1)) - log_q.gather(1, token.unsqueeze(1)))[:, 0]
        is_accepted = accept(acceptance(torch.where(now == -torch.inf, 0.0, log_ratio)), rng.child("accept"))
        after = SingleSiteState(move(is_accepted, moved, x), torch.where(is_accepted, proposed, now))
        return after, SingleSiteInfo(is_accepted, K)

    def _proposal(self, base: LanguageModel, x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "K V"]:
        """log q(· | c, x_<t) at the site of each chain, normalised."""
        context = x.contexts.lists()[0] or [base.eos]
        heads = [context + tokens[:t] for tokens, t in zip(x.lists()[0], site.tolist(), strict=True)]
        return Truncation(temperature=self.temperature)(base.next_log_probs(Sequences.from_lists(heads)).double().cpu())
