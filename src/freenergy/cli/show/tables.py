"""Tables and numbers for a person, on stdout."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

OUT = Console(highlight=False, emoji=False)  # texts are shown as they are: ":a:" is no emoji


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout."""
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    OUT.print(table)


def cell(value: float | None) -> str:
    """A number in four digits."""
    return "–" if value is None else f"{value:.4g}"


def interval(ends: Sequence[float | None]) -> str:
    """Both ends."""
    return "–" if None in ends else f"{cell(ends[0])} – {cell(ends[1])}"


def percent(change: dict[str, Any]) -> str:
    """A gain in percent, with its interval."""
    return f"{cell(change['percent'])} % ({interval(change['interval'])})"


def tail(text: str, width: int = 160) -> str:
    """The end of a text."""
    return text[-width:]


def short(value: Any) -> str:
    """Any value in few characters."""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
