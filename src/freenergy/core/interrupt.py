"""Graceful interruption: SIGTERM finishes the current unit of work, saves it and exits.

A scheduler that preempts a job sends SIGTERM and waits a little. Long work polls ``stop_requested`` between its units
(training after every step, everything else whenever it reports progress), leaves complete files and raises
``Interrupted``; the same command resumes from there later.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_requested = threading.Event()


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
