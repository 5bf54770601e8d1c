"""Progress bars with the remaining time, on stderr; a requested stop takes effect at the next report."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from freenergy.cli.show.tables import OUT
from freenergy.core.interrupt import raise_if_stop_requested
from freenergy.core.progress import Advance


@final
class Bars:
    """Shows progress bars on stderr; in a pipe or a log only the messages."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """Show a bar for one task."""
        raise_if_stop_requested()
        task = self._bars.add_task(label, total=total, unit=unit, note="")

        def advance(amount: float | int, note: str = "") -> None:
            self._bars.update(task, advance=amount)
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
