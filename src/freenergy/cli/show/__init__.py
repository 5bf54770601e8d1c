"""What a person sees: progress bars on stderr, tables and texts on stdout; a stop takes effect at the next report."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from freenergy.core.progress import Advance, raise_if_stop_requested

OUT = Console(highlight=False, emoji=False)  # show texts verbatim: ":a:" is not an emoji
_ACROSS = 4  # columns of a wide table that fit next to the names of its rows
_SECONDS = 30.0  # between two lines in a log


@final
class Bars:
    """Shows progress bars on stderr; in a pipe or a log a line every half minute."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, emoji=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> "Bars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Show a bar for one task."""
        raise_if_stop_requested()
        task = self._bars.add_task(label, total=total, unit=unit, note="")
        in_log = None if self._console.is_terminal else _Lines(label, total, unit)

        def advance(amount: float | int, note: str = "") -> None:
            self._bars.update(task, advance=amount)
            if in_log and (line := in_log.advance(amount)):
                self.say(line)
            if note:
                self._bars.update(task, note=note)
            raise_if_stop_requested()

        try:
            yield advance
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def above(self) -> Iterator[Console]:
        """Yield the stream for results while bars are shown: stdout, or above the bars if both are on one screen.

        The bars hold still meanwhile: drawn by their own thread between two lines, they wipe out one of them.
        """
        with self._bars.live._lock:
            yield self._console if OUT.is_terminal and self._console.is_terminal else OUT

    def say(self, message: str) -> None:
        """Print one line above the bars."""
        self._bars.console.print(escape(message))


@final
class _Lines:
    """The progress of one task, as lines for a log."""

    def __init__(self, label: str, total: float | int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done, self._begun = 0.0, time.monotonic()
        self._last = self._begun

    def advance(self, amount: float | int) -> str:
        """Count what was done, and return a line where one is due."""
        self._done, now = self._done + amount, time.monotonic()
        if now - self._last < _SECONDS:
            return ""
        self._last = now
        if not self._total:
            return f"{self._label}: {self._done:,.0f} {self._unit}"
        left = (now - self._begun) * max(self._total - self._done, 0) / max(self._done, 1e-9)
        return f"{self._label}: {self._done:,.0f} of {self._total:,.0f} {self._unit}, about {_clock(left)} left"


def _clock(seconds: float) -> str:
    """Format a duration as minutes and seconds.

    >>> _clock(75.4), _clock(3675.0)
    ('1:15', '61:15')
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout."""
    table = Table(*columns, title=escape(title), title_justify="left")
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    OUT.print(table)


def show_wide(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table a few columns at a time, each part with the names of the rows."""
    for first in range(1, len(columns), _ACROSS):
        part = slice(first, first + _ACROSS)
        names = [[row[0], *row[part]] for row in rows]
        show_table(title if first == 1 else "", [columns[0], *columns[part]], names)


def tail(text: str, width: int = 160) -> str:
    """Return the last ``width`` characters."""
    return text[-width:]
