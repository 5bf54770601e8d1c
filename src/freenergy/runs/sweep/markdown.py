"""The tables for people, as rows of cells and as Markdown."""

from collections.abc import Sequence
from typing import Any

from freenergy.core.format import DASH
from freenergy.core.format import significant as number


def reach(value: float) -> str:
    """Half the width of an interval, in two digits."""
    return f"{value:.2g}"


def with_interval(found: dict[str, Any]) -> str:
    """Mean ± half-width.

    >>> with_interval({"mean": 12.0, "interval": [11.5, 12.5]}), with_interval({"mean": 12.0, "interval": [None, None]})
    ('12 ± 0.5', '12')
    """
    low, high = found["interval"]
    if found["mean"] is None or low is None:
        return number(found["mean"])
    return f"{number(found['mean'])} ± {reach((high - low) / 2)}"


def measured(values: Sequence[float | None]) -> str:
    """Value and interval.

    >>> measured([1.5, 1.0, 2.0]), measured([0.03, 0.03, 0.03]), measured([1.5, None, None])
    ('1.5 (1 to 2)', '0.03', '1.5')
    """
    value, low, high = values
    if low is None or low == high:
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def main_rows(table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: what was measured, what the paper has, and what it cost."""
    papers = [column for column in table["columns"] if any(column in row["paper"] for row in table["rows"])]
    # a paper may have a column that was not measured here
    papers += sorted({column for row in table["rows"] for column in row["paper"]} - set(papers))
    head = ["row", *table["columns"], *(f"{column}, paper" for column in papers), "steps", "CPU minutes"]
    cells = []
    for row in table["rows"]:
        name = f"{row['name']} (no more training)" if row["kind"] == "base" else row["name"]
        numbers = [_cell(row, column) for column in table["columns"]]
        steps = row["steps"]
        shown = f"{steps[0]:,}" if len(set(steps)) == 1 else f"{min(steps):,}–{max(steps):,}"
        minutes = f"{row['cpu_seconds']['mean'] / 60:.3g}"
        cells.append([name, *numbers, *(number(row["paper"].get(column)) for column in papers), shown, minutes])
    return head, cells


def _cell(row: dict[str, Any], column: str) -> str:
    if row["diverged"]:
        return "diverged"
    return with_interval(row["numbers"][column]) if column in row["numbers"] else DASH


def difference_rows(table: dict[str, Any], *, with_base: bool) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: differences from controls, and from the base where they are asked for.

    Over seeds only the main column is shown; ``table.json`` has them all.
    """
    cells = []
    for each in table["comparisons"]:
        if not (each["is_control"] or with_base):
            continue
        pair = f"{each['ours']} − {each['other']}"
        cells += [[pair, name, measured(values), "test data"] for name, values in each["on_test"]]
        if len(table["seeds"]) > 1:
            main = [(name, values) for name, values in each["over_seeds"] if name == table["main_column"]]
            cells += [[pair, name, measured(values), "seeds"] for name, values in main]
    return ["difference", "of", "value (95 % interval)", "interval over"], cells


def budget(table: dict[str, Any]) -> str:
    """What it has cost, in one sentence."""
    seeds = ", ".join(map(str, table["seeds"]))
    minutes = f"{table['budget']['cpu_seconds'] / 60:.3g}"
    threads = table["budget"]["threads"]
    return f"Seeds {seeds}; {minutes} CPU minutes of training steps in all, {threads} thread{'s' * (threads != 1)}."


def markdown(table: dict[str, Any]) -> str:
    """The whole table with its differences."""
    seeds = len(table["seeds"])
    spread = f"; mean ± half of the 95 % t interval over {seeds} seeds" if seeds > 1 else ""
    parts = [f"# {table['name']}", table["about"], f"Test split{spread}.", _grid(*main_rows(table))]
    controls = _grid(*difference_rows(table, with_base=False))
    if any(each["is_control"] for each in table["comparisons"]):
        parts += ["## Against the control of equal compute", controls]
    rest = {**table, "comparisons": [each for each in table["comparisons"] if not each["is_control"]]}
    if rest["comparisons"]:
        parts += ["## Against the base", _grid(*difference_rows(rest, with_base=True))]
    return "\n\n".join(filter(None, [*parts, budget(table)])) + "\n"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
