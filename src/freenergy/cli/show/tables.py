"""Tables and numbers on stdout."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from freenergy.core.format import DASH, significant

OUT = Console(highlight=False, emoji=False)  # show texts verbatim: ":a:" is not an emoji


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout."""
    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    OUT.print(table)


def interval(ends: Sequence[float | None]) -> str:
    """Format both ends; a missing one gives a dash."""
    return DASH if None in ends else f"{significant(ends[0])} – {significant(ends[1])}"


def percent(change: dict[str, Any]) -> str:
    """Format a gain in percent, with its interval."""
    return f"{significant(change['percent'])} % ({interval(change['interval'])})"


def tail(text: str, width: int = 160) -> str:
    """Return the last ``width`` characters."""
    return text[-width:]


def short(value: Any) -> str:
    """Format any value briefly."""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
