"""Stopping on request: finish what is in hand, keep it, and say so.

A scheduler that wants its machine back sends SIGTERM and waits a little. Long work asks between its units whether it
should stop (training after every step, everything else whenever it reports progress), leaves whole files and raises
``Stopped``; the same command goes on from there later.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


class Stopped(Exception):  # noqa: N818 (it is no error)
    """Work has ended early because it was asked to; what was done is kept."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, SIGTERM is a request. Only the main thread may call this."""

    def ask(number: int, frame: FrameType | None) -> None:
        _asked.set()

    _asked.clear()
    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked.clear()


def is_asked() -> bool:
    """Whether someone wants this process to stop."""
    return _asked.is_set()


def check() -> None:
    """Raise ``Stopped`` where someone wants this process to stop."""
    if is_asked():
        raise Stopped
