"""Metropolis independence sampling: chains that propose from the base and converge to the residual model.

    x' ~ q(· | c),      move to x' with probability min(1, w(x')/w(x)),      else stay     (``kernels.independence``)
    TV(P, law after t steps)  ≤  (1 − Z/w_max)^t,        since from any x it goes to x' with at least (Z/w_max) · P(x')

Z is estimated from the proposals, and w_max is given or the largest weight that was seen, so the distance is an
estimate (Liu 1996). Several results are the ends of as many chains, so they are independent. A proposal does not depend
on where a chain is, so those of many steps are drawn in one batch.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng, Streams
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import residual_of
from freenergy.partition import log_partition
from freenergy.samplers.kernels.independence import Independence, IndependenceState
from freenergy.samplers.sampled import SILENT, Sampled, check_call


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Metropolis:
    """Chains of ``steps`` steps, one per result; their ends are the results."""

    steps: int = 256
    log_bound: float | None = None  # log w_max, where it is known
    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"
    batch_size: int = 256  # proposals in one call of the models

    def __post_init__(self) -> None:
        check_range(self, "steps", "batch_size", at_least=1)
        check_range(self, "log_bound")

    @property
    def kernel(self) -> Independence:
        """What one step does."""
        return Independence(truncation=self.truncation, law=self.law)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Start every chain at a draw and let it run."""
        check_call(target, num)
        kernel, accepted, time, together = self.kernel, 0, 0, max(1, self.batch_size // num)
        state = IndependenceState(kernel.propose(target, num, rng.child("start")))
        log_weight, tokens = [state.at.log_weight[0]], state.at.tokens_drawn
        with progress.track("stepping", self.steps, "steps") as advance:
            while time < self.steps:
                streams = [rng.child("step", t) for t in range(time, min(time + together, self.steps))]
                for stream, proposal in zip(streams, self._proposals(target, num, streams), strict=True):
                    state, info = kernel.move(state, proposal, stream)
                    accepted += int(info.is_accepted.sum())
                    log_weight.append(info.log_weight)
                    tokens += info.base_tokens
                time += len(streams)
                advance(len(streams))
        return self._sampled(state.at, torch.cat(log_weight), tokens, accepted / (self.steps * num))

    def _proposals(self, target: Target[Model], num: int, streams: list[Rng]) -> list[Scored]:
        """The proposals of several steps, drawn as several contexts of which each has its own stream."""
        if len(streams) == 1 or not residual_of(target).base.draws_here:
            return [self.kernel.propose(target, num, stream) for stream in streams]
        contexts = target.contexts[torch.zeros(len(streams), dtype=torch.long)]
        found = self.kernel.propose(target.after(contexts), num, Streams(streams))
        return [found.of_context(b) for b in range(len(streams))]

    def _sampled(self, at: Scored, log_weight: Float[Tensor, " n"], tokens: int, acceptance: float) -> Sampled:
        n = len(log_weight)
        if (at.log_weight == -torch.inf).any():
            raise UserError(
                f"no candidate is acceptable: a chain met none with any weight in {self.steps} steps (an energy of "
                "+inf); make more steps, or look at the energy"
            )
        largest = float(log_weight.max())
        notes = [f"the distance is estimated badly: {why}" for why in log_partition(log_weight[None]).verdicts() if why]
        if self.log_bound is not None and largest > self.log_bound:
            notes.insert(0, f"the stated log_bound of {self.log_bound:g} is not a bound: a weight is at {largest:g}")
        log_bound = largest if self.log_bound is None else max(largest, self.log_bound)
        return Sampled(
            x=at.x.to("cpu"),
            log_base=at.log_base,
            energy=at.energy,
            method="metropolis",
            law=self.law,
            distance=distance(float(log_weight.logsumexp(0)) - math.log(n), log_bound, self.steps),
            is_estimated=True,
            base_tokens=tokens,
            acceptance=acceptance,
            notes=tuple(notes),
        )


def distance(log_z: float, log_bound: float, steps: int) -> float:
    """(1 − Z/w_max)^t: what the total variation cannot exceed after t steps.

    >>> distance(math.log(0.5), 0.0, 3)
    0.125
    """
    return max(0.0, -math.expm1(log_z - log_bound)) ** steps
