"""Sampling in steps: a generator that yields what it needs from the models, and is sent what they gave.

    steps  = sampling(sampler, target, num, rng)         yields requests, returns ``Sampled``
    result = drive(steps)                                answers each request at once

Who drives the generator decides when its requests are answered and with which others: the command line answers them
one after the other, the server draws for many clients in one call. The results are the same. A sampler with a method
``requests`` takes part in that; any other sampler is one request, answered by one call of it.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast, final, runtime_checkable

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Target
from freenergy.core.scored import Law, Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import Residual
from freenergy.samplers.sampled import SILENT, Sampled, Sampler

T = TypeVar("T")


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


@runtime_checkable
class SharesDraws(Protocol):
    """A sampler whose draws can be made together with those of others."""

    def requests(self, target: Target[Any], num: int, rng: Rng) -> Generator[DrawRequest, Scored, Sampled]:
        """Sample as ``__call__`` does, in steps."""


def sampling(sampler: Sampler, target: Target[Any], num: int, rng: Rng) -> Generator[Request, Any, Sampled]:
    """Call any sampler in steps."""
    if isinstance(sampler, SharesDraws):
        return (yield from sampler.requests(target, num, rng))
    sampled: Sampled = yield SamplerRequest(sampler=sampler, target=target, num=num, rng=rng)
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
