"""Importance resampling: the default way to write with a residual model (Algorithm 1 of Deng et al. 2020).

    x_1 … x_n ~ q(· | c),      emit x_i with probability w_i / Σ_j w_j

The law of what is emitted, with w the weight of x and W_{n−1} the sum of n − 1 other weights, and how far it can be:

    P_n(x) = n · q(x) · w(x) · E[1 / (w(x) + W_{n−1})]  ≥  P(x) · n / (n − 1 + w(x)/Z)            (Jensen)
    TV(P, P_n) ≤ E_P[(w/Z − 1)⁺ / (n − 1 + w/Z)],    which falls as 1/n where E_q[w²] is finite

The bound is estimated from the same draws (w_i/Z by n·w_i/Σw). Several results are chosen among the same candidates:
with replacement each follows P_n, without only the first does; with a goal for the effective sample size the law holds
only approximately. ``Plain`` keeps every draw: its target is the base itself, so its distance is 0.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import relative_to_base
from freenergy.partition import log_partition
from freenergy.samplers.sampled import SILENT, DrawRequest, Sampled, check_call, drive, picked


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resampling:
    """n candidates, of which results are emitted by weight."""

    candidates: int = 256  # n; the maximum where there is a goal
    replacement: bool = True  # False: results of a context are different strings
    effective: float | None = None  # goal: stop drawing at this effective sample size
    check_every: int = 128  # candidates between two checks of the goal
    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"
    batch_size: int = 256  # candidates in one call of the models

    def __post_init__(self) -> None:
        check_range(self, "candidates", "check_every", "batch_size", at_least=1)
        if self.effective is not None and not 1 <= self.effective <= self.candidates:
            raise UserError(
                f"{self.effective} effective candidates out of at most {self.candidates} were asked for: ask for 1 "
                "to as many as there are candidates"
            )

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Draw, weigh, choose."""
        return drive(self.requests(target, num, rng), progress)

    def requests(self, target: Target[Model], num: int, rng: Rng) -> Generator[DrawRequest, Scored, Sampled]:
        """Do the same in steps, so that many share the calls of the models."""
        check_call(target, num)
        candidates = yield from self.draws(target, rng.child("draw"))
        return self.choose(candidates, num, rng.child("choose"))

    def draws(self, target: Target[Model], rng: Rng) -> Generator[DrawRequest, Scored, Scored]:
        """Draw n candidates, or as many as reach the goal."""
        request = DrawRequest(
            target=relative_to_base(target), rng=rng,
            num=self.candidates if self.effective is None else self.check_every,
            truncation=self.truncation, law=self.law, batch_size=self.batch_size,
        )  # fmt: skip
        parts, n = list[Scored](), 0
        while n < self.candidates:
            num = min(request.num, self.candidates - n)
            parts.append((yield from replace(request, first=n, num=num).in_parts()))
            n += num
            found = Scored.cat(parts, dim=1)
            if self.effective is not None and found.ess.item() >= self.effective:
                break
        return found

    def choose(self, candidates: Scored, num: int, rng: Rng) -> Sampled:
        """Emit ``num`` of the candidates."""
        candidates.check_any_acceptable()
        chosen = _chosen(candidates.merged()[0], num, self.replacement, rng)
        return Sampled(
            x=picked(candidates, chosen),
            log_base=candidates.log_base[:, chosen],
            energy=candidates.energy[:, chosen],
            method="resampling",
            law=self.law,
            distance=distance(candidates.log_weight[0]),
            is_estimated=True,
            base_tokens=candidates.tokens_drawn,
            candidates=candidates,
            chosen=chosen,
            notes=_notes(candidates, self.effective),
        )


def distance(log_weight: Float[Tensor, " n"]) -> float:
    """The bound on TV(P, P_n) above, with the weights of n draws standing for q and Z."""
    n, u = len(log_weight), log_weight.softmax(0)
    return float((u * ((n * u - 1).clamp(min=0) / (n - 1 + n * u))).sum()) if n > 1 else 1.0


def _chosen(log_weight: Float[Tensor, " n"], num: int, replacement: bool, rng: Rng) -> Int[Tensor, " num"]:
    """By weight, one after the other; without replacement a string that was chosen is out."""
    there = int((log_weight > -torch.inf).sum())
    if not replacement and there < num:
        raise UserError(
            f"{num} different results were asked for, but there are {there} different candidates with any weight: take "
            "more candidates, or fewer results"
        )
    left, chosen = log_weight.clone(), []
    for _ in range(num):
        chosen.append(int(rng.categorical(left)))
        if not replacement:
            left[chosen[-1]] = -torch.inf
    return torch.tensor(chosen)


def _notes(candidates: Scored, goal: float | None) -> tuple[str, ...]:
    n, ess = candidates.num, candidates.ess.item()
    notes = []
    if n > 1 and (why := log_partition(candidates.log_weight).verdicts()[0]):
        notes.append(f"the result follows its target only roughly: {why}; take more candidates")
    if goal is not None and ess < goal:
        notes.append(f"{ess:.1f} of {n} candidates are effective, fewer than the {goal:g} asked for")
    return tuple(notes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Independent draws of the base."""

    truncation: Truncation = ANCESTRAL
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Draw."""
        return drive(self.requests(target, num, rng), progress)

    def requests(self, target: Target[Model], num: int, rng: Rng) -> Generator[DrawRequest, Scored, Sampled]:
        """Do the same in steps, so that many share the calls of the models."""
        check_call(target, num)
        request = DrawRequest(
            target=relative_to_base(target), num=num, rng=rng.child("draw"),
            truncation=self.truncation, batch_size=self.batch_size,
        )  # fmt: skip
        found = yield from request.in_parts()
        return Sampled(
            x=picked(found, torch.arange(found.num)),
            log_base=found.log_base,
            energy=found.energy,
            method="base",
            law="base",
            distance=0.0,
            is_estimated=False,
            base_tokens=found.tokens_drawn,
        )
