"""One entry of the server's queue, its events for the client that waits, and draws of many clients in one call.

The contexts of several requests become one batch, each with its own stream.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from freenergy.core.progress import Progress
from freenergy.core.rng import Streams
from freenergy.core.scored import Scored
from freenergy.core.sequences import Sequences
from freenergy.samplers.sampled import DrawRequest, SamplerRequest
from freenergy.text.chunks import Drawn
from freenergy.text.texts import Texts
from freenergy.text.write import Added
from freenergy.web.slices import SlicedWork


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Any other work for the thread of the models; it reports its progress, so that it can be paused and ended."""

    work: Callable[[Progress], Any]

    def answer(self, progress: Progress) -> Any:
        """Do it."""
        return self.work(progress)


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


class Finished(NamedTuple):
    """All texts, and how they came about: the last event."""

    texts: Texts


Event = Drawn | Added | Finished
Steps = Generator[ThreadRequest | Event, Any, Any]


@final
class QueueEntry:
    """Steps that are taken on the thread of the models, and their events for a task of the event loop."""

    def __init__(self, steps: Steps, loop: asyncio.AbstractEventLoop) -> None:
        self.steps, self.loop, self.asked = steps, loop, time.monotonic()
        self.events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.request: ThreadRequest | None = None  # None: not started
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = self.was_served = False
        self.seconds_served = 0.0  # of the model's time, shared ones in equal parts
        self.sliced: SlicedWork | None = None  # the request in progress, where it is not a shared draw

    def tell(self, event: Event | Exception | None) -> None:
        """Pass an event on; an exception and None are the last."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the event loop has ended
            self.is_over = True

    def advance(self, answer: Any) -> None:
        """Run with the answer to its request, up to the next request or the end."""
        try:
            while not isinstance(step := self.steps.send(answer), ThreadRequest):
                self.tell(step)
                answer = None
            self.request = step
        except StopIteration as end:
            self.result, self.is_over = end.value, True
        except Exception as error:
            self.fail(error)

    def run_slice(self) -> SlicedWork:
        """Work on a request that shares nothing, for a slice."""
        assert self.request is not None, "an entry that has not started is not served"
        if self.sliced is None or self.sliced.has_ended:
            self.sliced = SlicedWork(self.request.answer, lambda: self.is_over)
        self.sliced.run_slice()
        return self.sliced

    @property
    def is_abandoned(self) -> bool:
        """Whether paused work waits to be ended, since nobody waits for it."""
        return self.is_over and self.sliced is not None and self.sliced.is_paused

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.is_over = error, True

    def end(self) -> None:
        """Send the end event; only after the entry has left the queue, so that its slot is free by then."""
        self.tell(self.error)
