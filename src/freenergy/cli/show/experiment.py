"""What came of an experiment."""

from typing import Any

from freenergy.cli.show.tables import OUT, show_table
from freenergy.runs.sweep.table import budget, difference_rows, main_rows

_ACROSS = 4  # columns that fit next to the name


def show_experiment(table: dict[str, Any]) -> None:
    """The table, a few columns at a time, and what differs from the controls."""
    head, rows = main_rows(table)
    for first in range(1, len(head), _ACROSS):
        some = slice(first, first + _ACROSS)
        show_table(table["name"] if first == 1 else "", ["row", *head[some]], [[row[0], *row[some]] for row in rows])
    head, rows = difference_rows(table, with_base=False)
    if rows:
        show_table("Against the control of equal compute", head, rows)
    OUT.print(budget(table))
