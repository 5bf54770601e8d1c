"""An experiment in TOML: a sweep over any recipe.

recipe      the first row: the name of a recipe, or its sections
set         changes to all rows, as nested tables
variants    the whole table once for each of these changes
continued   changes to all rows that begin with the weights of the first row; without it every row begins from scratch
rows        the other rows, each with its own changes
grid        a row for each combination of some values
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.runs.run import Recipe
from freenergy.runs.sweep.rows import RowRecipe, Sweep, SweepRow

_FIRST = "base"
Table = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRow:
    """One row of the table."""

    name: str
    set: Table = field(default_factory=dict)
    scratch: bool = False  # begin from scratch, where the others begin with the weights of the first row
    control: bool = False  # also run a control of equal compute


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows for values of some settings; ``full`` crosses all of them, else one varies while the others are as set.

    One control serves all: it costs what the most expensive of them costs.
    """

    name: str = "E-ARM"
    vary: dict[str, tuple[float, ...]]  # the path of a setting → its values
    set: Table = field(default_factory=dict)
    full: bool = True
    scratch: bool = True
    control: bool = True

    def __post_init__(self) -> None:
        if not any(self.vary.values()):
            raise UserError("the grid varies nothing: give grid.vary a setting with values")
        for path, values in self.vary.items():
            if len(set(values)) != len(values):
                raise UserError(f"grid.vary names a value of {path} twice: leave one of them out")

    def points(self) -> list[tuple[float, ...]]:
        """Returns the values of every row, in the order of ``vary``."""
        if self.full:
            return list(product(*self.vary.values()))
        usual = [_value(self.set, path) for path in self.vary]
        found = [
            (*usual[:i], value, *usual[i + 1 :]) for i, values in enumerate(self.vary.values()) for value in values
        ]
        return list(dict.fromkeys(found))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The settings of a sweep, as they stand in a file."""

    name: str
    about: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    recipe: str | Table
    set: Table = field(default_factory=dict)
    variants: dict[str, Table] = field(default_factory=dict)
    continued: Table | None = None
    rows: tuple[ExperimentRow, ...] = ()
    grid: Grid | None = None
    paper: dict[str, dict[str, float]] = field(default_factory=dict)  # row → column → what a paper reports

    def sweep(self, recipe: Table, make: Callable[[Table, str], Recipe]) -> Sweep:
        """Returns the sweep; ``recipe`` are the sections of the first row, ``make`` checks sections."""
        recipe = merged({**recipe, "name": self.name, "about": self.about}, self.set)
        variants = {}
        for variant, changes in (self.variants or {"": {}}).items():
            builder = _Builder(self, merged(recipe, changes), make, f"variants.{variant}" if variant else "recipe")
            variants[variant] = tuple(builder.rows())
        return Sweep(name=self.name, about=self.about, seeds=self.seeds, variants=variants, paper=self.paper)


@final
@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the rows of one variant."""

    experiment: Experiment
    recipe: Table
    make: Callable[[Table, str], Recipe]
    place: str

    def rows(self) -> Iterator[SweepRow]:
        """Yields the first row, the others, the grid, and controls last."""
        first = self._made(self.recipe, self.place)
        first.check_first_row()
        yield SweepRow(name=_FIRST, kind="base", recipe=first, scratch=True)
        controls: list[SweepRow] = []
        for i, row in enumerate(self.experiment.rows):
            made = self._row(row.name, "row", row.set, row.scratch, f"rows.{i}")
            if row.control:
                controls.append(_control(row.name, [made]))
            yield made
        points = list(self._points())
        yield from points
        if points and self.experiment.grid and self.experiment.grid.control:
            controls.append(_control("grid", points))
        yield from controls

    def _points(self) -> Iterator[SweepRow]:
        grid = self.experiment.grid
        for values in grid.points() if grid else ():
            assert grid is not None
            point = {path.split(".")[-1]: value for path, value in zip(grid.vary, values, strict=True)}
            name = ", ".join([grid.name, *(f"{key.replace('_', ' ')} {value:g}" for key, value in point.items())])
            changes = grid.set
            for path, value in zip(grid.vary, values, strict=True):
                changes = merged(changes, _nested(path, value))
            yield self._row(name, "grid", changes, grid.scratch, "grid", point)

    def _row(
        self, name: str, kind: Any, changes: Table, scratch: bool, place: str, point: Mapping[str, float] | None = None
    ) -> SweepRow:
        table, continued = self.recipe, self.experiment.continued
        is_scratch = scratch or continued is None
        if not is_scratch:
            table = merged(merged(table, continued or {}), {"begin_from": f"../{_FIRST}"})
        recipe = self._made(merged(table, changes), place)
        return SweepRow(name=name, kind=kind, recipe=recipe, scratch=is_scratch, point=point or {})

    def _made(self, table: Table, place: str) -> RowRecipe:
        made = self.make(table, place)
        if not isinstance(made, RowRecipe):
            raise UserError(f"{place}: runs of this family cannot be rows of a table; take another family")
        return made


def _control(name: str, of: list[SweepRow]) -> SweepRow:
    try:
        recipe = of[0].recipe.control()
    except UserError as error:
        raise UserError(f"the row {name!r}: {error}") from None
    names = tuple(row.name for row in of)
    return SweepRow(name=f"{name}, control", kind="control", recipe=recipe, scratch=of[0].scratch, of=names)


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """Returns a table with changes, which reach into its sections; a section of another kind replaces one.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    found = dict(table)
    for key, value in changes.items():
        old = found.get(key)
        found[key] = value
        if isinstance(value, dict) and isinstance(old, dict):
            is_other_kind = "kind" in value.keys() & old.keys() and value["kind"] != old["kind"]
            found[key] = value if is_other_kind else merged(old, value)
    return found


def _nested(path: str, value: Any) -> Table:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def _value(table: Table, path: str) -> float:
    found: Any = table
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, int | float):
        raise UserError(f"grid.set has no number for {path}, which it has while another setting varies: set it")
    return float(found)
