"""How long work reports its progress, and how it is interrupted.

Library code takes a ``Progress`` and calls it; the command line draws bars with the remaining time, other callers pass
nothing. A scheduler that preempts a job sends SIGTERM and waits a little. Long work polls ``stop_requested`` between
its units (training after every step, everything else whenever it reports progress), leaves complete files and raises
``Interrupted``; the same command resumes from there later.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Protocol, final, runtime_checkable

_requested = threading.Event()


@runtime_checkable
class Advance(Protocol):
    """Callback: takes the units done since the last call, and an optional short note."""

    def __call__(self, amount: float | int, note: str = "") -> None:
        """Advance by ``amount`` units."""


@runtime_checkable
class Progress(Protocol):
    """Receives progress reports."""

    def track(self, label: str, total: float | int | None = None, unit: str = "") -> AbstractContextManager[Advance]:
        """Start a task of ``total`` units; call the result with the units done since the last call."""

    def say(self, message: str) -> None:
        """Show one line of text to the user."""


@final
class Silent:
    """Ignores all reports."""

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Return a callback that does nothing."""
        yield lambda amount, note="": None

    def say(self, message: str) -> None:
        """Ignore the message."""


SILENT = Silent()


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Work stopped early because a stop was requested; everything finished so far is saved."""


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Treat SIGTERM as a stop request inside the block. Only the main thread may call this."""

    def request(number: int, frame: FrameType | None) -> None:
        _requested.set()

    _requested.clear()
    before = signal.signal(signal.SIGTERM, request)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _requested.clear()


def stop_requested() -> bool:
    """Whether SIGTERM has asked this process to stop."""
    return _requested.is_set()


def raise_if_stop_requested() -> None:
    """Raise ``Interrupted`` if a stop was requested."""
    if stop_requested():
        raise Interrupted
