"""How long work tells how far it is, without knowing who looks.

Library code takes a ``Progress`` and calls it; the command line draws bars with time left, others pass nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, final, runtime_checkable


@runtime_checkable
class Advance(Protocol):
    """Called with the units done since the last call, and a few words on how it goes."""

    def __call__(self, amount: float | int, note: str = "") -> None:
        """Go on by ``amount``."""
        ...


@runtime_checkable
class Progress(Protocol):
    """Someone who is told how far the work is."""

    def track(self, label: str, total: float | int | None = None, unit: str = "") -> AbstractContextManager[Advance]:
        """Begin a piece of work of ``total`` units; call the result with the units done since the last call."""
        ...

    def say(self, message: str) -> None:
        """One line of words for a person."""
        ...


@final
class Silent:
    """Nobody looks."""

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Count nothing."""
        yield lambda amount, note="": None

    def say(self, message: str) -> None:
        """Say nothing."""
