"""One entry of the server's queue: a generator of requests, and its events for the client that waits for them."""

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, final

from freenergy.text.chunks import Drawn
from freenergy.text.texts import Texts
from freenergy.text.write import Added
from freenergy.web.sharing import ThreadRequest, UntilLeft


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
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
        self.progress = UntilLeft(lambda: self.is_over)

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

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.is_over = error, True

    def end(self) -> None:
        """Send the end event; only after the entry has left the queue, so that its slot is free by then."""
        self.tell(self.error)
