"""What every sampler returns, and how it is called: at once, or in steps.

    sampler(target, num, rng) -> Sampled
    steps  = sampling(sampler, target, num, rng)         yields what it needs from the models, returns ``Sampled``
    result = drive(steps)                                answers each request at once

A sampler is its settings. It reports which law it samples, how far its own law can be from that (``distance``: a bound
on the total variation; None where none is known), whether that is an estimate, and its cost; one context at a time.

Who drives the steps decides when requests are answered and with which others: the server draws for many clients in one
call, with the same results. A sampler with a method ``requests`` takes part in that; any other is one request.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, cast, final, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import Residual

SILENT = Silent()
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """``num`` continuations of one context."""

    x: Continuations  # [1, num]
    log_base: Float[Tensor, "1 num"]
    energy: Float[Tensor, "1 num"]
    method: str
    law: Law | Literal["base"]
    distance: float | None  # total variation between the law of one result and the target, at most; None: unknown
    is_estimated: bool  # the distance is an estimate from the draws, not a guarantee
    base_tokens: int  # drawn from the base
    log_partition: float | None = None  # log Ẑ, where the sampler has an estimate of its own
    ess: float | None = None  # effective candidates or particles, likewise
    acceptance: float | None = None  # share of proposals that were accepted
    candidates: Scored | None = None  # with their weights, where results were chosen among candidates
    chosen: Int[Tensor, " num"] | None = None  # which of them
    notes: tuple[str, ...] = ()  # reasons not to trust it

    @property
    def log_score(self) -> Float[Tensor, "1 num"]:
        """log P_LM − E: not normalised."""
        return self.log_base - self.energy


@runtime_checkable
class Sampler(Protocol):
    """x ~ P, or nearly: settings that can be called."""

    def __call__(self, target: Target[Any], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Sample ``num`` results for the one context of the target; the same ``rng`` gives the same results."""


def picked(candidates: Scored, chosen: Int[Tensor, " num"]) -> Continuations:
    """Select candidates of the one context, a candidate perhaps more than once."""
    x = candidates.x
    return Continuations(x.contexts.to("cpu"), x.tokens.cpu()[:, chosen], x.lengths.cpu()[:, chosen])


def check_call(target: Target[Model], num: int) -> None:
    """Refuse several contexts (samplers take one at a time) and no results."""
    if len(target) != 1:
        raise UserError(f"{len(target)} contexts were given to a sampler: give one at a time")
    if num < 1:
        raise UserError(f"{num} results were asked for: ask for 1 or more")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """Up to ``num`` scored draws for each context of a target, from number ``first`` on."""

    target: Target[Residual]
    num: int
    rng: Rng
    first: int = 0
    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"
    batch_size: int = 256
    label: str = "drawing"

    def answer(self, progress: Progress = SILENT) -> Scored:
        """Draw all of them."""
        with progress.track(self.label, self.num * len(self.target), "candidates") as advance:
            return self.target.model.propose(
                self.target.contexts, self.num, self.target.space, self.rng.shift(candidates=self.first),
                truncation=self.truncation, law=self.law, batch_size=self.batch_size, advance=advance,
            )  # fmt: skip

    def in_parts(self) -> "Generator[DrawRequest, Scored, Scored]":
        """Request draws until all are there, however many come at a time."""
        parts: list[Scored] = []
        num = 0
        while num < self.num:
            parts.append((yield replace(self, first=self.first + num, num=self.num - num)))
            num += parts[-1].num
        return parts[0] if len(parts) == 1 else Scored.cat(parts, dim=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRequest:
    """One call of a sampler that shares no draws with others."""

    sampler: Sampler
    target: Target[Any]
    num: int
    rng: Rng

    def answer(self, progress: Progress = SILENT) -> Sampled:
        """Call it."""
        return self.sampler(self.target, self.num, self.rng, progress)


Request = DrawRequest | SamplerRequest


def sampling(sampler: Sampler, target: Target[Any], num: int, rng: Rng) -> Generator[Request, Any, Sampled]:
    """Call any sampler in steps."""
    in_steps = getattr(sampler, "requests", None)  # of samplers whose draws can be made together with those of others
    sampled: Sampled
    if in_steps is not None:
        sampled = yield from in_steps(target, num, rng)
    else:
        sampled = yield SamplerRequest(sampler=sampler, target=target, num=num, rng=rng)
    return sampled


def answered(steps: Generator[Any, Any, T], progress: Progress = SILENT) -> Generator[Any, None, T]:
    """Answer each request at once, and pass on what is not a request: events."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        answer = step.answer(progress) if isinstance(step, DrawRequest | SamplerRequest) else (yield step)


def drive(
    steps: Generator[Any, Any, T], progress: Progress = SILENT, on_event: Callable[[Any], None] = lambda event: None
) -> T:
    """Answer all requests; the result is what the generator returns."""
    events = answered(steps, progress)
    while True:
        try:
            on_event(next(events))
        except StopIteration as end:
            return cast(T, end.value)
