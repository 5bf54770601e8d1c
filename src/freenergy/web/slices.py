"""Work of unknown length in slices of a fraction of a second, so that it delays no other request for longer.

The work runs on a thread of its own, but only while the model thread waits for it: of the two exactly one runs.
Whenever the work reports progress, it may be paused (its slice is over) or ended (its client left). So a sampler, a
ranking or a table of next tokens needs no other form than the ``Progress`` that it takes anyway.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from freenergy.core.progress import Advance, Progress

SLICE_SECONDS = 0.02


class ClientLeft(Exception):  # noqa: N818
    """Nobody waits for this work any more."""


@final
class SlicedWork:
    """Work that takes a ``Progress``, which this is: it reports nothing, and pauses or ends the work."""

    def __init__(self, work: Callable[[Progress], Any], is_over: Callable[[], bool]) -> None:
        self._work, self._is_over = work, is_over
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._slice_end = 0.0
        self._thread: threading.Thread | None = None
        self.has_ended = False
        self.result: Any = None
        self.error: Exception | None = None

    @property
    def is_paused(self) -> bool:
        """Whether it has begun and is neither running nor over."""
        return self._thread is not None and not self.has_ended

    def run_slice(self, seconds: float = SLICE_SECONDS) -> bool:
        """Run until the next report of progress after ``seconds``, or the end; return whether it has ended."""
        self._slice_end = time.monotonic() + seconds
        if self._thread is None:
            name = threading.current_thread().name
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        return self.has_ended

    @torch.no_grad()  # belongs to a thread
    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except Exception as error:
            self.error = error
        finally:
            self.has_ended = True
            self._stopped.release()

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Return a callback that pauses the work at the end of a slice, and raises once the client has left."""
        yield self._advance

    def _advance(self, amount: float | int, note: str = "") -> None:
        if not self._is_over() and time.monotonic() >= self._slice_end:
            self._stopped.release()
            self._go.acquire()
        if self._is_over():
            raise ClientLeft

    def say(self, message: str) -> None:
        """Ignore the message."""
