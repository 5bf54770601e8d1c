"""Progress reporting without a dependency on any display.

Library code takes a ``Progress`` and calls it; the command line draws bars with the remaining time, other callers pass
nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, final, runtime_checkable


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
