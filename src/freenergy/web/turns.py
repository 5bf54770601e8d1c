"""One thread owns the models; clients take turns on it, and share calls where they can.

Each entry of the queue is a generator of requests (``text.write.generate``). The entry that has had the least of the
model's time is served, and in one turn of four the one that has waited longest, with all others that request the same
kind of draws: their contexts become one batch, and each draws from its own stream, as it would alone. An entry gets a
part of the draws that it requests (all of them if no other entry waits) and goes to the end of the queue, so a large
request delays the others by one part at most, and a disconnected client is noticed between two parts. Work that shares
no draws (other samplers, rankings, tables) has turns of a slice each.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from freenergy.core.scored import Scored
from freenergy.samplers.sampled import DrawRequest, Sampled
from freenergy.web.entries import Event, QueueEntry, Steps, draw_together, kind
from freenergy.web.not_served import Busy, Stopping, TooLong
from freenergy.web.settings import Limits

_LONGEST_WAIT_SECONDS = 60
_LONGEST_WAITING_EVERY = 4  # turns
_PAUSED = object()  # instead of an answer: the work goes on at the next turn


@final
@dataclass(slots=True)
class QueueCounts:
    """Counts for the metrics."""

    asked: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0  # by clients that disconnected or timed out
    refused: int = 0
    too_long: int = 0
    tokens: int = 0
    seconds_waiting: float = 0.0  # until an entry first ran
    seconds_working: float = 0.0
    batches: Counter[int] = field(default_factory=Counter)  # number of model calls by number of contexts


@final
class Answers(AsyncIterator[Event]):
    """The events of an entry; a client that stops listening, in whichever way, frees its slot."""

    def __init__(self, turns: "Turns", entry: QueueEntry, seconds: float) -> None:
        self._turns, self._seconds, self._is_over = turns, seconds, False
        self._deadline = entry.loop.time() + seconds
        self.entry = entry

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._deadline):
                event = await self.entry.events.get()
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
        """Stop listening, and free the slot."""
        self._is_over = True
        self._turns.drop(self.entry)

    async def aclose(self) -> None:
        """Close it like any asynchronous generator."""
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


@final
class Turns:
    """The queue, and the thread that serves it."""

    def __init__(self, limits: Limits, *, is_shared: bool) -> None:
        self.limits, self.counts = limits, QueueCounts()
        self.max_together = limits.rows if is_shared else 1
        self._entries: deque[QueueEntry] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_draining, self._turn = False, 0
        self._paused = set[QueueEntry]()  # used by the thread only
        self._pace_seconds, self._since_seconds = 1.0, 0.0  # of work from one finished entry to the next

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; later calls do nothing."""
        if self._thread is not None:
            return
        self._is_draining = False
        self._thread = threading.Thread(target=self._work, name="freenergy-model", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Refuse new entries; waiting ones get an error."""
        with self._changed:
            waiting, self._entries, self._is_draining = list(self._entries), deque(), True
            for entry in waiting:
                entry.fail(Stopping())
            self._changed.notify()
        for entry in waiting:
            entry.end()

    def close(self) -> None:
        """Stop after the current batch; waiting entries get an error."""
        thread, self._thread = self._thread, None
        self.drain()
        if thread is not None:
            thread.join()

    def check_room(self, entries: int) -> None:
        """Raise ``Busy`` if ``entries`` more do not fit, ``Stopping`` if none is taken any more."""
        if self._is_draining:
            raise Stopping
        if len(self._entries) + entries > self.limits.queue:
            self.counts.refused += 1
            raise Busy(min(max(1, round(self._pace_seconds * len(self._entries))), _LONGEST_WAIT_SECONDS))

    def ask(self, steps: Steps) -> Answers:
        """Join the queue. Call it inside the event loop that will listen."""
        if self._is_draining:
            raise Stopping
        entry = QueueEntry(steps, asyncio.get_running_loop())
        answers = Answers(self, entry, self.limits.timeout_seconds)
        with self._changed:
            self.counts.asked += 1
            self._entries.append(entry)
            self._changed.notify()
        return answers

    def drop(self, entry: QueueEntry) -> None:
        """Remove an entry from the queue, if it is still there; a batch in progress for it is discarded."""
        with self._changed:
            if not entry.is_over and entry in self._entries:
                self._entries.remove(entry)
                self.counts.cancelled += 1
            entry.is_over = True
            self._changed.notify()

    @torch.no_grad()
    def _work(self) -> None:
        """Serve entries until stopped: the thread's main function."""
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._entries and self._thread is me and not self._abandoned():
                    self._changed.wait()
                is_closing, entries = self._thread is not me, list(self._entries)
            for entry in self._abandoned():
                entry.run_slice()  # ends it
            if is_closing:
                return
            for entry in entries:
                if entry.request is None:
                    entry.advance(None)
            group, count = self._next(self._in_order([entry for entry in entries if not entry.is_over]))
            start = time.monotonic()
            if group:
                self._serve(group, count)
            self._settle(entries, group, start)

    def _abandoned(self) -> list[QueueEntry]:
        """Return entries whose paused work is to be ended, and forget work that has ended."""
        self._paused = {entry for entry in self._paused if entry.sliced is not None and entry.sliced.is_paused}
        return [entry for entry in self._paused if entry.is_abandoned]

    def _in_order(self, entries: list[QueueEntry]) -> list[QueueEntry]:
        """Put first what has had the least time of the model; in one turn of four what has waited longest.

        So small requests are not held up by any number of large ones, and those come to their end all the same.
        """
        self._turn = (self._turn + 1) % _LONGEST_WAITING_EVERY
        return sorted(entries, key=lambda entry: entry.seconds_served) if self._turn else entries

    def _next(self, entries: Sequence[QueueEntry]) -> tuple[list[QueueEntry], int]:
        """Return the entries of the next batch, and the candidates for each; 0: one call that is not shared."""
        if not entries or (wanted := kind(first := entries[0].request)) is None:
            return list(entries[:1]), 0
        rows = self.limits.rows
        assert isinstance(first, DrawRequest), "only draws have a kind"
        count = min(first.num, rows, max(self.limits.least_rows, rows // len(entries)))
        fitting = [
            entry
            for entry in entries
            if isinstance(entry.request, DrawRequest) and kind(entry.request) == wanted and entry.request.num >= count
        ]
        return fitting[: min(max(1, rows // count), self.max_together)], count

    def _serve(self, group: Sequence[QueueEntry], count: int) -> None:
        """Call the models once; if that fails for several entries, retry each alone."""
        try:
            parts = self._parts(group, count)
        except Exception as error:
            if len(group) == 1:
                group[0].fail(error)
            else:
                for entry in group:
                    self._serve([entry], count)
            return
        for entry, part in zip(group, parts, strict=True):
            if part is not _PAUSED and not entry.is_over:
                entry.advance(part)

    def _parts(self, group: Sequence[QueueEntry], count: int) -> list[Any]:
        if count:
            found: list[Any] = [
                *draw_together([entry.request for entry in group if isinstance(entry.request, DrawRequest)], count)
            ]
            self.counts.batches[len(found)] += 1
        else:
            [entry] = group
            found = [self._slice(entry)]
        for part in found:
            self.counts.tokens += _tokens(part)
        return found

    def _slice(self, entry: QueueEntry) -> Any:
        """Work on a request that shares nothing; return its answer, or that it was paused."""
        work = entry.run_slice()
        if not work.has_ended:
            self._paused.add(entry)
            return _PAUSED
        if work.error is not None:
            raise work.error
        return work.result

    def _settle(self, entries: Sequence[QueueEntry], group: Sequence[QueueEntry], start: float) -> None:
        """Move served entries to the end of the queue, and remove finished ones."""
        seconds = time.monotonic() - start
        with self._changed:
            for entry in group:
                self.counts.seconds_waiting += 0.0 if entry.was_served else start - entry.asked
                entry.was_served = True
                entry.seconds_served += seconds / len(group)
                if entry in self._entries:
                    self._entries.remove(entry)
                    self._entries.append(entry)
            done = [entry for entry in entries if entry.is_over and entry in self._entries]
            for entry in done:
                self._entries.remove(entry)
            failed = sum(entry.error is not None for entry in done)
            self.counts.failed += failed
            self.counts.finished += len(done) - failed
            self.counts.seconds_working += seconds
            self._since_seconds += seconds
            if done:
                self._pace_seconds = 0.8 * self._pace_seconds + 0.2 * self._since_seconds / len(done)
                self._since_seconds = 0.0
        for entry in done:
            entry.end()


def _tokens(answer: Any) -> int:
    if isinstance(answer, Scored):
        return answer.tokens_drawn
    return answer.base_tokens if isinstance(answer, Sampled) else 0
