"""The numbers of a sweep, with their uncertainty.

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
