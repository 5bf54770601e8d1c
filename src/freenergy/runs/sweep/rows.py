"""The rows of a sweep: recipes that are run once per seed, and compared.

The first row is what all others are compared with. A control is a row of equal compute: how long it runs is decided
when the rows that it is the control of have been done.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement
from freenergy.runs.run import Recipe, Run

LONGEST_NAME = 100
_NO_CONTROL = "rows of this family have no control: leave control out"


@runtime_checkable
class RowRecipe(Recipe, Protocol):
    """A recipe whose runs can be rows of a table; by default any may be the first, and none has a control."""

    @property
    def main_column(self) -> str:
        """The number that figures show."""

    @property
    def is_plain(self) -> bool:
        """True when the cost of the row's steps is that of a control's."""
        return False

    def numbers(self, run: Run[Any]) -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""

    def history(self, run: Run[Any]) -> dict[str, Any]:
        """Returns ``steps``, ``epoch_steps``, ``best_step``, ``validation`` and ``cpu_seconds`` of a run."""

    def compare(self, ours: Sequence[Run[Any]], others: Sequence[Run[Any]], rng: Rng) -> dict[str, Measurement]:
        """Returns the differences ours − others with 95 % intervals, paired, of runs of the same seeds."""

    def check_first_row(self) -> None:
        """Refuse what cannot be the row that all others are compared with."""
        return

    def check_rows(self, rows: Sequence[Any], folder: Path, progress: Progress) -> None:
        """Refuse, before anything slow is done in ``folder`` and its siblings, a row that cannot be done."""
        return

    def control(self) -> "RowRecipe":
        """Returns the recipe of the row's control."""
        raise UserError(_NO_CONTROL)

    def control_steps(self, of: Sequence[Run[Any]], plain: Mapping[str, Run[Any]]) -> dict[str, Any]:
        """Returns the ``steps`` that cost what the most expensive of some rows has cost, and how that was found."""
        raise UserError(_NO_CONTROL)

    def with_steps(self, steps: int) -> "RowRecipe":
        """Returns the recipe with other steps."""
        raise UserError(_NO_CONTROL)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One row, which is a run for each seed."""

    name: str
    kind: Literal["base", "row", "grid", "control"]
    recipe: RowRecipe
    scratch: bool  # it does not begin with the weights of the first row
    of: tuple[str, ...] = ()  # the rows that this is the control of
    against: tuple[str, ...] = ()  # other rows that it is compared with
    point: Mapping[str, float] = field(default_factory=dict)  # of a grid

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(self.name)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All rows, by variant: the name of a variant is empty where there is only one."""

    name: str
    about: str
    seeds: tuple[int, ...]
    variants: Mapping[str, tuple[SweepRow, ...]]
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # row → column → what a paper reports

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > LONGEST_NAME or not folder_name(self.name):
            raise UserError(f"name is {self.name[:40]!r}: take up to {LONGEST_NAME} letters, digits, dots and dashes")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds is {list(self.seeds)}: give at least one seed, none of them twice")
        for seed in self.seeds:
            Rng(seed)  # refuses a bad one
        _check_names([variant for variant in self.variants if variant], "variant")
        for rows in self.variants.values():
            _check_names([row.name for row in rows], "row")
            names = {row.name for row in rows}
            for row in rows:
                if strange := set(row.against) - names:
                    raise UserError(f"the row {row.name!r} is against {min(strange)!r}: name one of the other rows")
        for name in self.paper:
            if name not in self.row_names():
                known = ", ".join(self.row_names())
                raise UserError(f"paper names the row {name!r}, which there is not: choose one of {known}")

    def row_names(self) -> list[str]:
        """Returns the names of the rows of the table."""
        return [labelled(variant, row.name) for variant, rows in self.variants.items() for row in rows]


def labelled(variant: str, name: str) -> str:
    """Returns a row's name in the table."""
    return f"{variant}: {name}" if variant else name


def folder_name(name: str) -> str:
    """Returns a name in small letters, digits, dots and dashes.

    >>> folder_name("E-ARM + label smoothing 0.1")
    'e-arm-label-smoothing-0.1'
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _check_names(names: Sequence[str], what: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        folder = folder_name(name)
        if not folder or len(name) > LONGEST_NAME:
            raise UserError(f"a {what} is called {name[:40]!r}: take up to {LONGEST_NAME} letters, digits and dashes")
        if folder in seen:
            raise UserError(f"two {what}s are called {seen[folder]!r} and {name!r}: give each a name of its own")
        seen[folder] = name
