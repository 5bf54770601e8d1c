"""Locally balanced proposals on texts: moves weighted by how much they would raise the density, exactly corrected.

    d(t, v) = log_score(x with x_t = v) − log_score(x)          exactly: V·L readings
            ≈ ∂_{t,v} log_score − ∂_{t,x_t} log_score           by the gradient at one-hot tokens: one reading

    LocallyBalanced:    (t, v) ~ exp(d(t, v)/2), v ≠ x_t             one token per step (Zanella 2020; with gradients:
                                                                     Gibbs with gradients, Grathwohl et al. 2021)
    DiscreteLangevin:   x'_t ~ exp(d(t, v)/2 − 1[v ≠ x_t]/α)         every token at once (Zhang et al. 2022)

Both are accepted by min(1, P(x') q(x | x') / (P(x) q(x' | x))), so the target is invariant however bad the gradient's
guess is. Without this correction the second is 0.4 to 0.9 away from its target in total variation: it is not offered.
"""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations, Soft
from freenergy.models.residual import Residual
from freenergy.samplers.kernels.metropolis_hastings import (
    MetropolisHastings,
    MetropolisHastingsInfo,
    MetropolisHastingsState,
    Proposed,
)
from freenergy.samplers.kernels.sites import num_sites, site_scores, with_token


@runtime_checkable
class SlopeModel(Protocol):
    """A model that has a gradient with respect to one-hot tokens."""

    def slope(self, x: Continuations) -> Float[Tensor, "chains L V"]:
        """∂ log_score / ∂ (one-hot token at place t), or an estimate of it."""


def slope(target: Target[Model], x: Continuations) -> Float[Tensor, "chains L V"]:
    """Return the model's slope, or that of an energy that reads ``Soft`` tokens; the base then has no part in it."""
    if isinstance(target.model, SlopeModel):
        return target.model.slope(x).detach().double().cpu()
    score = target.model.energy if isinstance(target.model, Residual) else target.model.log_score
    soft = Soft.one_hot(x, target.space.vocab_size)
    values = soft.values.clone().requires_grad_()
    try:
        with torch.enable_grad():
            total = score(Soft(soft.contexts, values, soft.lengths)).sum()  # type: ignore[arg-type]
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"the model {type(target.model).__name__} has no gradient with respect to tokens: give it a slope, or an "
            "energy that reads Soft tokens, or set gradient to false"
        ) from error
    sign = -1.0 if isinstance(target.model, Residual) else 1.0
    return sign * torch.autograd.grad(total, values)[0][0].double().cpu()


def differences(target: Target[Model], x: Continuations, *, gradient: bool) -> Float[Tensor, "chains L V"]:
    """Return d(t, v) of every move; 0 at the present token, −inf where nothing may be written."""
    L, V = x.tokens.shape[2], target.space.vocab_size
    if gradient:
        own = slope(target, x)
        d = own - own.gather(2, x.tokens[0].unsqueeze(2))
    else:
        count = num_sites(x, target.space)
        every = [site_scores(target, x, torch.where(count > t, t, -1)) for t in range(L)]
        d = torch.stack(every, dim=1)
        now = d.gather(2, x.tokens[0].unsqueeze(2))
        d = d - torch.where(now == -torch.inf, 0.0, now)  # where the density is zero any move will do
    if target.space.eos is not None:
        d[:, :, target.space.eos] = -torch.inf
    is_site = (torch.arange(L) < num_sites(x, target.space).unsqueeze(1)).unsqueeze(2)
    here = torch.nn.functional.one_hot(x.tokens[0], V).bool()
    return torch.where(is_site, d, -torch.inf).masked_fill(here, 0.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneMove:
    """(t, v) with probability proportional to exp(d/2)."""

    gradient: bool

    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Choose a site and a token for each chain, in one draw."""
        V, K = target.space.vocab_size, x.shape[1]
        log_q, stays = self._moves(target, x)
        move = rng.rows(1, K, 1).categorical(log_q.unsqueeze(0))[0]
        site, token = torch.where(stays, -1, move // V), move % V
        old = x.tokens[0].gather(1, (move // V).unsqueeze(1)).squeeze(1)
        moved = with_token(x, site, token)
        back, _ = self._moves(target, moved)
        forward = log_q.gather(1, move.unsqueeze(1)).squeeze(1)
        backward = back.gather(1, (move // V * V + old).unsqueeze(1)).squeeze(1)
        return Proposed(moved, torch.where(stays, 0.0, backward - forward))

    def _moves(self, target: Target[Model], x: Continuations) -> tuple[Float[Tensor, "chains LV"], Tensor]:
        """Return log q of every move that changes something, and which chains have none."""
        here = torch.nn.functional.one_hot(x.tokens[0], target.space.vocab_size).bool()
        log_q = (differences(target, x, gradient=self.gradient) / 2).masked_fill(here, -torch.inf).flatten(1)
        stays = (log_q == -torch.inf).all(1)
        log_q = torch.where(stays.unsqueeze(1), 0.0, log_q)
        return log_q - log_q.logsumexp(1, keepdim=True), stays


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AllSites:
    """Every token at once, each with probability proportional to exp(d/2 − 1[v ≠ x_t]/α)."""

    step_size: float
    gradient: bool

    def propose(self, target: Target[Model], x: Continuations, rng: Rng) -> Proposed:
        """Choose a token for every place of each chain."""
        (_, K), L = x.shape, x.tokens.shape[2]
        rows, log_q = rng.rows(1, K, L), self._log_q(target, x)
        tokens = torch.stack([rows.categorical(log_q[:, t].unsqueeze(0))[0] for t in range(L)], dim=1)
        moved = Continuations(x.contexts, tokens.unsqueeze(0), x.lengths)
        back = self._log_q(target, moved)
        forward = log_q.gather(2, tokens.unsqueeze(2)).sum((1, 2))
        backward = back.gather(2, x.tokens[0].unsqueeze(2)).sum((1, 2))
        return Proposed(moved, backward - forward)

    def _log_q(self, target: Target[Model], x: Continuations) -> Float[Tensor, "chains L V"]:
        here = torch.nn.functional.one_hot(x.tokens[0], target.space.vocab_size).double()
        d = differences(target, x, gradient=self.gradient) / 2 - (1 - here) / self.step_size
        return d - d.logsumexp(2, keepdim=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocallyBalanced:
    """One token per step, by what it would change; ``gradient`` guesses that from one reading of the model."""

    gradient: bool = False

    @property
    def kernel(self) -> MetropolisHastings:
        """What one step does."""
        return MetropolisHastings(proposal=OneMove(gradient=self.gradient))

    def init(self, target: Target[Model], x: Continuations) -> MetropolisHastingsState:
        """Start chains at given positions [1, chains]."""
        return self.kernel.init(target, x)

    def step(
        self, target: Target[Model], state: MetropolisHastingsState, rng: Rng
    ) -> tuple[MetropolisHastingsState, MetropolisHastingsInfo]:
        """Propose one move of every chain, and accept or stay."""
        return self.kernel.step(target, state, rng)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteLangevin:
    """All tokens at once, with step size α; adjusted, so that the target is invariant."""

    step_size: float = 0.4
    gradient: bool = False

    def __post_init__(self) -> None:
        check_range(self, "step_size", above=0)

    @property
    def kernel(self) -> MetropolisHastings:
        """What one step does."""
        return MetropolisHastings(proposal=AllSites(step_size=self.step_size, gradient=self.gradient))

    def init(self, target: Target[Model], x: Continuations) -> MetropolisHastingsState:
        """Start chains at given positions [1, chains]."""
        return self.kernel.init(target, x)

    def step(
        self, target: Target[Model], state: MetropolisHastingsState, rng: Rng
    ) -> tuple[MetropolisHastingsState, MetropolisHastingsInfo]:
        """Propose new tokens everywhere, and accept or stay."""
        return self.kernel.step(target, state, rng)
