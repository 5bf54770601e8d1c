"""Metropolis independence sampling: chains that propose from the base and end up at the joint model.

    x' ~ q(· | c),      move to x' with probability min(1, w(x')/w(x)),      else stay

The target is invariant, since P(x) · q(x') · min(1, w'/w) = q(x) q(x') · min(w, w')/Z is the same both ways. Whatever
its start, after t steps a chain is near (Liu 1996; the chain is uniformly ergodic):

    TV(P, law after t steps)  ≤  (1 − Z/w_max)^t,        since from any x it goes to x' with at least (Z/w_max) · P(x')

Z is estimated from the proposals, and w_max is stated or the largest weight that was seen, so the distance is an
estimate. Weights that were not seen make it too small.

Several results are the ends of as many chains, not places along one: they are then independent, and each is as near as
the distance says. A proposal does not depend on where a chain is, so steps are proposed in batches all the same. A
chain may start where the weight is zero; from there it takes any proposal.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, Energy, LanguageModel, Truncation
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.partition import log_partition
from freenergy.samplers.candidates import Candidates, Target, propose
from freenergy.samplers.sampled import SILENT, Sampled, check_counts, check_one, tokens_in


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where the chains are, and how many steps they have made.

    Energies in it are those of the energy that it was made with. To go on with another, keep the positions and make
    a new state: ``State(at=weigh(energy, draws), time=…)``.
    """

    at: Candidates  # [1, num]
    time: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """What one step did."""

    accepted: Bool[Tensor, " num"]
    log_weight: Float[Tensor, " num"]  # of the proposals
    base_tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Metropolis:
    """``num`` chains of ``steps`` steps; their ends are the results."""

    steps: int = 256
    num: int = 1
    log_bound: float | None = None  # log w_max, where it is known
    truncation: Truncation = ANCESTRAL
    target: Target = "restricted"
    batch_size: int = 256  # proposals in one call of the models

    def __post_init__(self) -> None:
        check_counts(self, ("steps", "num", "batch_size"))
        if self.log_bound is not None and not math.isfinite(self.log_bound):
            raise UserError(f"log_bound is {self.log_bound}: set it to a number, or leave it out")

    def __call__(
        self,
        base: LanguageModel,
        energy: Energy,
        context: Sequences,
        space: SequenceSpace,
        rng: Rng,
        progress: Progress = SILENT,
    ) -> Sampled:
        """Start every chain at a draw and let it run."""
        state = self.init(base, energy, context, space, rng)
        log_weight, tokens, accepted = [state.at.log_weight[0]], tokens_in(state.at.x), 0
        block = max(1, self.batch_size // self.num)
        with progress.track("stepping", self.steps, "steps") as advance:
            while state.time < self.steps:
                steps = min(block, self.steps - state.time)
                proposals = self._propose(
                    base, energy, context, space, rng, (state.time + 1) * self.num, steps * self.num
                )
                for i in range(steps):
                    places = torch.arange(i * self.num, (i + 1) * self.num)
                    state, info = _moved(state, proposals.take(places), rng)
                    accepted += int(info.accepted.sum())
                log_weight.append(proposals.log_weight[0])
                tokens += tokens_in(proposals.x)
                advance(steps)
        return self._sampled(state, torch.cat(log_weight), tokens, accepted / (self.steps * self.num))

    def init(self, base: LanguageModel, energy: Energy, context: Sequences, space: SequenceSpace, rng: Rng) -> State:
        """Every chain at a draw of the proposal."""
        check_one(context)
        return State(at=self._propose(base, energy, context, space, rng, 0, self.num))

    def step(
        self, base: LanguageModel, energy: Energy, space: SequenceSpace, state: State, rng: Rng
    ) -> tuple[State, Info]:
        """One step of every chain. The state's time names the random numbers: pass the same ``rng`` every time."""
        K = state.at.energy.shape[1]
        proposal = self._propose(base, energy, state.at.x.contexts, space, rng, (state.time + 1) * K, K)
        return _moved(state, proposal, rng)

    def _propose(
        self,
        base: LanguageModel,
        energy: Energy,
        context: Sequences,
        space: SequenceSpace,
        rng: Rng,
        first: int,
        num: int,
    ) -> Candidates:
        """Proposals from ``first`` on: those of a step for every chain, then those of the next."""
        return propose(
            base, energy, context, num, space, rng.child("draw").shift(candidates=first),
            truncation=self.truncation, target=self.target, batch_size=self.batch_size,
        )  # fmt: skip

    def _sampled(self, state: State, log_weight: Float[Tensor, " n"], tokens: int, acceptance: float) -> Sampled:
        n, at = len(log_weight), state.at
        if (at.log_weight == -torch.inf).any():
            raise UserError(
                f"no candidate is acceptable: a chain met none with any weight in {self.steps} steps (an energy of "
                "+inf); make more steps, or look at the energy"
            )
        largest = float(log_weight.max())
        notes = [f"the distance is estimated badly: {why}" for why in log_partition(log_weight[None]).verdicts() if why]
        if self.log_bound is not None and largest > self.log_bound:
            notes.insert(0, f"the stated log_bound of {self.log_bound:g} is no bound: a weight is at {largest:g}")
        log_bound = largest if self.log_bound is None else max(largest, self.log_bound)
        return Sampled(
            x=at.x.to("cpu"),
            log_base=at.log_base,
            energy=at.energy,
            method="metropolis",
            target=self.target,
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


def _chance(now: Float[Tensor, " num"], new: Float[Tensor, " num"]) -> Float[Tensor, " num"]:
    """min(1, w'/w) from log-weights; 1 where the chain stands on a weight of zero."""
    return torch.where(now == -torch.inf, 0.0, (new - now).clamp(max=0)).exp()


def _moved(state: State, proposal: Candidates, rng: Rng) -> tuple[State, Info]:
    """Accept or stay, chain by chain."""
    now, new = state.at.log_weight[0], proposal.log_weight[0]
    accepted = rng.child("accept", state.time + 1).bernoulli(_chance(now, new)).bool()
    K = len(now)
    chosen = torch.arange(K) + K * accepted
    at = Candidates.cat([state.at, proposal], dim=1).take(chosen)
    info = Info(accepted=accepted, log_weight=new, base_tokens=tokens_in(proposal.x))
    return State(at=at, time=state.time + 1), info
