"""A sweep in a folder: every row of every seed is a run, then come the comparisons and the table.

    DIR/[VARIANT/]seed-S/ROW/      a run          DIR/[VARIANT/]comparisons/          DIR/table.json, table.md

    for each variant and seed:  first row → rows → controls;     then compare, then write

What is done already is not done again, whatever the process was killed at. The steps of a control depend on a clock, so
they are decided once and kept (``control.json``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import DivergenceError
from freenergy.core.files import read_json, write_json, write_text
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.workers.pool import InProcess, WorkerPool
from freenergy.evaluation.perplexity import Measurement
from freenergy.runs.folder import key_of
from freenergy.runs.run import Run, run, working_in
from freenergy.runs.sweep.rows import LONGEST_NAME, RowRecipe, Sweep, SweepRow, folder_name, labelled
from freenergy.runs.sweep.table import Group, markdown, table

TABLE, MARKDOWN = "table.json", "table.md"
_CONTROL, _DIVERGED = "control.json", "diverged.json"
_SILENT, _IN_PROCESS = Silent(), InProcess()


def run_sweep(
    sweep: Sweep, out: str | Path | None = None, *, progress: Progress = _SILENT, workers: WorkerPool = _IN_PROCESS
) -> dict[str, Any]:
    """Do what is not done yet; returns the content of ``table.json``.

    The folder is ``runs/NAME`` unless ``out`` names another.
    """
    folder = folder_of(sweep, out)
    with working_in(folder):
        groups = []
        for variant, rows in sweep.variants.items():
            root = folder / folder_name(variant) if variant else folder
            groups.append(_group(sweep, variant, rows, root, progress, workers))
        found = table(sweep, groups, folder)
        write_json(folder / TABLE, found)
        write_text(folder / MARKDOWN, markdown(found))
    return read_json(folder / TABLE)


def folder_of(sweep: Sweep, out: str | Path | None) -> Path:
    """Returns where a sweep is done."""
    return Path(out) if out is not None else Path("runs") / folder_name(sweep.name)


def _group(
    sweep: Sweep, variant: str, rows: Sequence[SweepRow], root: Path, progress: Progress, workers: WorkerPool
) -> Group:
    first = _Seed(sweep, variant, tuple(rows), root, sweep.seeds[0], progress, workers)
    start = first.run_of(rows[0])
    start.recipe.check_rows([row.recipe for row in rows], start.folder, progress)
    records = [replace(first, seed=seed).records() for seed in sweep.seeds]
    columns = [name for row in rows if not records[0][row.name]["diverged"] for name in records[0][row.name]["numbers"]]
    return Group(
        variant=variant,
        main_column=rows[0].recipe.main_column,
        columns=list(dict.fromkeys(columns)),
        rows=list(rows),
        root=root,
        records=records,
        comparisons=_compared(first, records),
    )


@final
@dataclass(frozen=True, slots=True)
class _Seed:
    """The rows of one variant and seed."""

    sweep: Sweep
    variant: str
    rows: tuple[SweepRow, ...]
    root: Path
    seed: int
    progress: Progress
    workers: WorkerPool

    def run_of(self, row: SweepRow, steps: int | None = None) -> Run[RowRecipe]:
        """Returns the run of a row."""
        name = f"{folder_name(self.sweep.name)}-{folder_name(labelled(self.variant, row.name))}"[:LONGEST_NAME]
        changes: dict[str, Any] = {"seed": self.seed, "name": name}
        recipe: RowRecipe = replace(row.recipe if steps is None else row.recipe.with_steps(steps), **changes)  # type: ignore[type-var]
        return Run(self.root / f"seed-{self.seed}" / row.folder, recipe, self.workers)

    def records(self) -> dict[str, dict[str, Any]]:
        """Do all rows; returns what came of each, by name."""
        runs, found = dict[str, Run[RowRecipe]](), dict[str, dict[str, Any]]()
        for row in self.rows:
            control = self._control(row, runs, found) if row.of else None
            runs[row.name] = self.run_of(row, None if control is None else control["steps"])
            begun_by = [found[self.rows[0].name]["key"]] if found else []
            found[row.name] = self._record(row, runs[row.name], begun_by)
        return found

    def _record(self, row: SweepRow, this: Run[RowRecipe], begun_by: list[str]) -> dict[str, Any]:
        """Do a row; one that has diverged is recorded, and is not tried again."""
        firsts = [self.root / f"seed-{seed}" / self.rows[0].folder for seed in (self.seed, self.sweep.seeds[0])]
        reuse = [folder for folder in firsts if folder != this.folder]
        key, path = key_of(this.recipe.to_json(), begun_by), this.folder / _DIVERGED
        if not path.is_file() or read_json(path).get("key") != key:
            try:
                done = list(run(this.recipe, this.folder, progress=self.progress, workers=self.workers, reuse=reuse))
            except DivergenceError as error:
                if row.kind == "base":  # there is nothing to begin the others with
                    raise
                write_json(path, {"key": key, "message": str(error)})
            else:
                numbers = dict(this.recipe.numbers(this))
                last = this.finished(done[-1].name)["key"]
                record = {"key": last, "numbers": numbers, "diverged": None, **this.recipe.history(this)}
                if not all(each.was_cached for each in done):
                    self.progress.say(f"{labelled(self.variant, row.name)}, seed {self.seed}: {_line(row, record)}")
                return record
        message = read_json(path)["message"]
        self.progress.say(f"{labelled(self.variant, row.name)}, seed {self.seed}: {message}")
        return {"key": key, "numbers": {}, "diverged": message, **this.recipe.history(this)}

    def _control(
        self, row: SweepRow, runs: dict[str, Run[RowRecipe]], found: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns how many steps a control has: decided once, and again when its rows have changed."""
        path = self.run_of(row).folder / _CONTROL
        key = key_of([found[name]["key"] for name in row.of])
        if not path.is_file() or read_json(path).get("key") != key:
            plain = {each.name: runs[each.name] for each in self.rows if each.recipe.is_plain and not each.of}
            write_json(path, {"key": key, **row.recipe.control_steps([runs[name] for name in row.of], plain)})
        return read_json(path)


def _line(row: SweepRow, record: dict[str, Any]) -> str:
    value = record["numbers"].get(row.recipe.main_column)
    shown = "–" if value is None else f"{value:.4g}"
    return f"{row.recipe.main_column} {shown}, {record['steps']} steps, {record['cpu_seconds'] / 60:.1f} CPU minutes"


def pairs(rows: Sequence[SweepRow]) -> list[tuple[SweepRow, SweepRow]]:
    """Returns which rows are compared: every row with its control, the rows that it names, and the first row."""
    by_name = {row.name: row for row in rows}
    controls = [(by_name[name], row) for row in rows for name in row.of]
    named = [(row, by_name[name]) for row in rows for name in row.against]
    return [*controls, *named, *((row, rows[0]) for row in rows[1:])]


def _compared(
    first: _Seed, records: Sequence[dict[str, dict[str, Any]]]
) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Compare on the test data; results are kept in files, since paired tests of translations take their time."""
    found = {}
    seeds = [replace(first, seed=seed) for seed in first.sweep.seeds]
    with first.progress.track("comparing", len(pairs(first.rows)), "pairs") as advance:
        for ours, other in pairs(first.rows):
            advance(1)
            if any(by[row.name]["diverged"] for by in records for row in (ours, other)):
                continue  # the table says so
            path = first.root / "comparisons" / f"{ours.folder}--{other.folder}.json"
            key = key_of([[by[row.name]["key"] for by in records] for row in (ours, other)])
            if not path.is_file() or read_json(path).get("key") != key:
                a, b = ([each.run_of(row) for each in seeds] for row in (ours, other))
                rng = Rng(first.sweep.seeds[0]).child("compare", ours.folder, other.folder)
                made = first.rows[0].recipe.compare(a, b, rng)
                kept = [[name, each.to_json()] for name, each in made.items()]
                write_json(path, {"key": key, "differences": kept})
            differences = read_json(path)["differences"]
            found[ours.name, other.name] = {name: Measurement(*values) for name, values in differences}
    return found
