"""Metropolis within Gibbs: one token at a time, at a random site.

    t ~ Uniform(sites of x),      v ~ q(· | c, x without x_t),      x' = x with x_t = v
    move with probability min(1, P(x') q(x_t) / (P(x) q(v))),      else stay

q is the base's prediction from what stands before (``causal``), its prediction from both sides (``cloze``), or
``uniform`` (``kernels.proposals``). P is invariant site by site. A causal step reads L tokens per chain where
``independence`` draws L, and moves by one: it suits energies under which whole proposals are rarely taken. The length
of a text stays, so where texts may end early these moves belong into a ``mixture``.
"""

from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.samplers.kernels.metropolis_hastings import (
    MetropolisHastings,
    MetropolisHastingsInfo,
    MetropolisHastingsState,
)
from freenergy.samplers.kernels.proposals import Site


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SingleSite:
    """A random site per step and chain; ``temperature`` flattens what is proposed for it."""

    proposal: Literal["causal", "cloze", "uniform"] = "causal"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)

    @property
    def kernel(self) -> MetropolisHastings:
        """What one step does."""
        return MetropolisHastings(proposal=Site(by=self.proposal, temperature=self.temperature))

    def init(self, target: Target[Model], x: Continuations) -> MetropolisHastingsState:
        """Start chains at given positions [1, chains]."""
        if target.space.eos is not None:
            raise UserError(
                "single-site replaces tokens of texts of one length, and these may end early: choose another sampler"
            )
        return self.kernel.init(target, x)

    def step(
        self, target: Target[Model], state: MetropolisHastingsState, rng: Rng
    ) -> tuple[MetropolisHastingsState, MetropolisHastingsInfo]:
        """Propose another token at one site of every chain, and accept or stay."""
        return self.kernel.step(target, state, rng)
