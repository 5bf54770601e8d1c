"""One thread owns the models; jobs take turns on it, and share calls where they can.

The jobs stand in a row. The one that has waited longest is served, with all others that need the same kind of draws:
their contexts become one batch, and each draws from its own stream, as it would alone. A job gets a part of what it
needs (all of it where nobody else waits) and goes to the end of the row, so a large question delays the others by one
part at most, and a client that goes away is noticed between two parts.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from freenergy.text.model import ResidualModel
from freenergy.web.jobs import Event, Need, Tell, can_share, draw
from freenergy.web.settings import Limits

Work = Callable[[], Any]
Steps = Generator[Need | Work, Any, Any]
_LONGEST_WAIT_SECONDS = 60


class Busy(Exception):  # noqa: N818
    """The queue is full."""

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"the queue is full: ask again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class TooLong(Exception):  # noqa: N818
    """The answer was not there in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the answer was not there within {seconds:g} seconds: ask for less, or at a quieter time")


@final
@dataclass(slots=True)
class Counts:
    """What has been done so far."""

    asked: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0  # by clients that went away, or that would have waited too long
    refused: int = 0
    too_long: int = 0
    tokens: int = 0
    seconds_waiting: float = 0.0  # until a job was first served
    seconds_working: float = 0.0
    batches: Counter[int] = field(default_factory=Counter)  # how many calls of the models had so many contexts


@final
class Job:
    """Steps that are taken on the model thread, and their events for a task of the event loop."""

    def __init__(self, make: Callable[[Tell], Steps], loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.asked = loop, time.monotonic()
        self.events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.steps = make(self.tell)
        self.need: Need | Work | None = None  # None: not begun
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = self.was_served = False

    def tell(self, event: Event | Exception | None) -> None:
        """Pass an event on; an exception and None are the last."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop has ended, and nobody listens
            self.is_over = True

    def advance(self, given: Any) -> None:
        """Take what was needed, up to the next need or the end."""
        try:
            self.need = self.steps.send(given)
        except StopIteration as end:
            self.result, self.is_over = end.value, True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The end, by an error."""
        self.error, self.is_over = error, True

    def end(self) -> None:
        """Tell that it is over: once it has left the row, so that whoever hears it finds its place free."""
        self.tell(self.error)


@final
class Answers(AsyncIterator[Event]):
    """The events of a job. Whoever stops listening, in whichever way, frees its place."""

    def __init__(self, turns: "Turns", job: Job, seconds: float) -> None:
        self._turns, self._seconds, self._is_over = turns, seconds, False
        self._deadline = job.loop.time() + seconds
        self.job = job

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._deadline):
                event = await self.job.events.get()
        except TimeoutError:
            self.cancel()
            self._turns.counts.too_long += 1
            raise TooLong(self._seconds) from None
        except BaseException:
            self.cancel()
            raise
        if event is None or isinstance(event, Exception):
            self._is_over = True
            raise StopAsyncIteration if event is None else event
        return event

    def cancel(self) -> None:
        """Nobody listens any more."""
        self._is_over = True
        self._turns.drop(self.job)

    async def aclose(self) -> None:
        """As of any asynchronous generator."""
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


@final
class Turns:
    """The row of jobs, and the thread that serves it."""

    def __init__(self, joint: ResidualModel, limits: Limits) -> None:
        self.joint, self.limits, self.counts = joint, limits, Counts()
        self._most_together = limits.rows if can_share(joint) else 1
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pace_seconds, self._since_seconds = 1.0, 0.0  # of work from one finished job to the next

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to work; once is enough."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="freenergy-model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the part that is being drawn; who still waits is told."""
        thread, self._thread = self._thread, None
        with self._changed:
            waiting, self._jobs = list(self._jobs), deque()
            self._changed.notify()
        for job in waiting:
            job.fail(TooLong(time.monotonic() - job.asked))
            job.end()
        if thread is not None:
            thread.join()

    def check_room(self, jobs: int) -> None:
        """``Busy`` where so many jobs more do not fit."""
        if len(self._jobs) + jobs > self.limits.queue:
            self.counts.refused += 1
            raise Busy(min(max(1, round(self._pace_seconds * len(self._jobs))), _LONGEST_WAIT_SECONDS))

    def ask(self, make: Callable[[Tell], Steps]) -> Answers:
        """Stand in the row. Call it inside the event loop that will listen."""
        job = Job(make, asyncio.get_running_loop())
        answers = Answers(self, job, self.limits.timeout_seconds)
        with self._changed:
            self.counts.asked += 1
            self._jobs.append(job)
            self._changed.notify()
        return answers

    def drop(self, job: Job) -> None:
        """Take a job out of the row, if it is still there; a part that is being drawn for it is thrown away."""
        with self._changed:
            if not job.is_over and job in self._jobs:
                self._jobs.remove(job)
                self.counts.cancelled += 1
            job.is_over = True

    @torch.no_grad()
    def _work(self) -> None:
        """What the thread does."""
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._jobs and self._thread is me:
                    self._changed.wait()
                if self._thread is not me:
                    return
                jobs = list(self._jobs)
            for job in jobs:
                if job.need is None:
                    job.advance(None)
            group, count = self._next([job for job in jobs if not job.is_over])
            begun = time.monotonic()
            if group:
                self._serve(group, count)
            self._settle(jobs, group, begun)

    def _next(self, jobs: Sequence[Job]) -> tuple[list[Job], int]:
        """Who is served now, and with how many candidates each."""
        if not jobs or not isinstance(first := jobs[0].need, Need):
            return list(jobs[:1]), 0
        rows = self.limits.rows
        count = min(first.num, rows, max(self.limits.least_rows, rows // len(jobs)))
        fitting = [
            job for job in jobs if isinstance(job.need, Need) and job.need.kind == first.kind and job.need.num >= count
        ]
        return fitting[: min(max(1, rows // count), self._most_together)], count

    def _serve(self, group: Sequence[Job], count: int) -> None:
        """One call of the models; where it fails for several, each is tried alone."""
        try:
            parts = self._parts(group, count)
        except Exception as error:
            if len(group) == 1:
                group[0].fail(error)
            else:
                for job in group:
                    self._serve([job], count)
            return
        for job, part in zip(group, parts, strict=True):
            if not job.is_over:
                job.advance(part)

    def _parts(self, group: Sequence[Job], count: int) -> list[Any]:
        """Return what each of the group gets."""
        work = group[0].need
        if not isinstance(work, Need):
            assert work is not None, "a job that has not begun is not served"
            return [work()]
        found = draw(self.joint, [job.need for job in group if isinstance(job.need, Need)], count)
        self.counts.batches[len(found)] += 1
        self.counts.tokens += sum(int(part.x.lengths.sum()) for part in found)
        return list(found)

    def _settle(self, jobs: Sequence[Job], group: Sequence[Job], begun: float) -> None:
        """Who was served goes to the end of the row; who is done leaves it."""
        seconds = time.monotonic() - begun
        with self._changed:
            for job in group:
                self.counts.seconds_waiting += 0.0 if job.was_served else begun - job.asked
                job.was_served = True
                if job in self._jobs:
                    self._jobs.remove(job)
                    self._jobs.append(job)
            done = [job for job in jobs if job.is_over and job in self._jobs]
            for job in done:
                self._jobs.remove(job)
            failed = sum(job.error is not None for job in done)
            self.counts.failed += failed
            self.counts.finished += len(done) - failed
            self.counts.seconds_working += seconds
            self._since_seconds += seconds
            if done:
                self._pace_seconds = 0.8 * self._pace_seconds + 0.2 * self._since_seconds / len(done)
                self._since_seconds = 0.0
        for job in done:
            job.end()
