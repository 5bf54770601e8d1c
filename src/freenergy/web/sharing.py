"""Requests of many clients in one call of the models: their contexts become one batch, each with its own stream."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from freenergy.core.progress import Advance, Progress
from freenergy.core.rng import Streams
from freenergy.core.scored import Scored
from freenergy.core.sequences import Sequences
from freenergy.samplers.requests import DrawRequest, SamplerRequest


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Any other work for the thread of the models."""

    work: Callable[[], Any]

    def answer(self, progress: Progress) -> Any:
        """Do it."""
        return self.work()


ThreadRequest = DrawRequest | SamplerRequest | Call


def kind(request: ThreadRequest | None) -> tuple[object, ...] | None:
    """Requests of the same kind can be drawn in one call; None is the kind of those that share with no other."""
    if not isinstance(request, DrawRequest) or len(request.target) > 1:
        return None
    return id(request.target.model), request.target.space, request.truncation, request.law


def draw_together(requests: Sequence[DrawRequest], count: int) -> list[Scored]:
    """Draw ``count`` candidates for each of some requests of one kind, in one call of the models."""
    one = requests[0]
    streams = [request.rng.shift(candidates=request.first) for request in requests]
    found = one.target.model.propose(
        Sequences.from_lists([request.target.contexts.lists()[0] for request in requests]),
        count,
        one.target.space,
        streams[0] if len(requests) == 1 else Streams(streams),
        truncation=one.truncation,
        law=one.law,
        batch_size=count * len(requests),
    )
    return [found.of_context(b) for b in range(len(requests))]


class ClientLeft(Exception):  # noqa: N818
    """Nobody waits for this work any more."""


@final
class UntilLeft:
    """A ``Progress`` that reports nothing and ends work that nobody waits for."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Return a callback that raises once the client has left."""
        yield self._advance

    def _advance(self, amount: float | int, note: str = "") -> None:
        if self._is_over():
            raise ClientLeft

    def say(self, message: str) -> None:
        """Ignore the message."""
