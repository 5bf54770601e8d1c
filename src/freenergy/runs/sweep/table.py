"""The numbers of a sweep with their uncertainty, as JSON, as rows of cells and as Markdown.

    over seeds:  mean m of s values,  m ± t_{97.5 %, s − 1} · sd/√s          differences are taken seed by seed first

The paired comparisons say how much a difference depends on the test data at hand; the spread over seeds says how much
on the luck of training. Neither contains the other, so both are reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from freenergy.core.format import DASH
from freenergy.core.format import significant as number
from freenergy.evaluation.perplexity import Measurement, measured_rate
from freenergy.runs.sweep.rows import Sweep, SweepRow, labelled


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What came of one variant, all seeds."""

    variant: str
    main_column: str
    columns: list[str]
    rows: list[SweepRow]
    root: Path
    records: list[dict[str, dict[str, Any]]]  # seed → row → record
    comparisons: dict[tuple[str, str], dict[str, Measurement]]  # (ours, other) → what differs


def over_seeds(values: Sequence[float | None]) -> Measurement:
    """Returns the mean and its t interval; nothing where a seed has no number, no interval for one seed."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return Measurement(None, None, None)
    return measured_rate(np.array(known), np.ones(len(known)))


def table(sweep: Sweep, groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    """Returns all of it as JSON-like values."""
    columns = list(dict.fromkeys(column for group in groups for column in group.columns))
    rows = [_row(sweep, group, row, folder) for group in groups for row in group.rows]
    return {
        "name": sweep.name,
        "about": sweep.about,
        "seeds": list(sweep.seeds),
        "columns": columns,
        "main_column": groups[0].main_column,
        "rows": rows,
        "comparisons": [each for group in groups for each in _comparisons(group)],
        "budget": {
            "cpu_seconds": sum(sum(row["cpu_seconds"]["seeds"]) for row in rows),
            "threads": torch.get_num_threads(),
        },
    }


def _row(sweep: Sweep, group: Group, row: SweepRow, folder: Path) -> dict[str, Any]:
    records = [by_row[row.name] for by_row in group.records]
    name = labelled(group.variant, row.name)
    controls = [labelled(group.variant, other.name) for other in group.rows if row.name in other.of]
    return {
        "name": name,
        "variant": group.variant,
        "kind": row.kind,
        "control": controls[0] if controls else None,
        "numbers": {column: summed([record["numbers"].get(column) for record in records]) for column in group.columns},
        "paper": sweep.paper.get(name, {}),
        "steps": [record["steps"] for record in records],
        "epochs": [record["steps"] / (record["epoch_steps"] or 1) for record in records],
        "diverged": next((record["diverged"] for record in records if record["diverged"]), None),
        "best_step": [record["best_step"] for record in records],
        "validation": summed([record["validation"] for record in records]),
        "cpu_seconds": summed([record["cpu_seconds"] for record in records]),
        "epoch_steps": records[0]["epoch_steps"],
        "scratch": row.scratch,
        "point": dict(row.point),
        "folders": [(group.root / f"seed-{seed}" / row.folder).relative_to(folder).as_posix() for seed in sweep.seeds],
    }


def summed(values: Sequence[float | None]) -> dict[str, Any]:
    """Returns a number of each seed, their mean and its interval."""
    found = over_seeds(values)
    return {"seeds": list(values), "mean": found.value, "interval": found.interval}


def _comparisons(group: Group) -> list[dict[str, Any]]:
    found_pairs = []
    for (ours, other), found in group.comparisons.items():
        names = labelled(group.variant, ours), labelled(group.variant, other)
        found_pairs.append(
            {
                "ours": names[0],
                "other": names[1],
                "is_control": any(row.name == other and row.of for row in group.rows),
                # pairs, since JSON objects are written sorted
                "on_test": [[name, each.to_json()] for name, each in found.items()],
                "over_seeds": [[column, _difference(group, ours, other, column)] for column in group.columns],
            }
        )
    return found_pairs


def _difference(group: Group, ours: str, other: str, column: str) -> list[float | None]:
    values: list[float | None] = []
    for by_row in group.records:
        a, b = by_row[ours]["numbers"].get(column), by_row[other]["numbers"].get(column)
        values.append(None if a is None or b is None else a - b)
    return over_seeds(values).to_json()


def with_interval(found: dict[str, Any]) -> str:
    """Mean ± half-width.

    >>> with_interval({"mean": 12.0, "interval": [11.5, 12.5]}), with_interval({"mean": 12.0, "interval": [None, None]})
    ('12 ± 0.5', '12')
    """
    low, high = found["interval"]
    if found["mean"] is None or low is None:
        return number(found["mean"])
    return f"{number(found['mean'])} ± {(high - low) / 2:.2g}"


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
