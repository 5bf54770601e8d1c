"""An experiment in TOML: a sweep over any recipe.

recipe      the first row: the name of a recipe, or its sections
set         changes to all rows, as nested tables
variants    the whole table once for each of these changes
continued   changes to all rows that begin with the weights of the first row; without it every row begins from scratch
rows        the other rows, each with its own changes
grid        a row for each combination of some values
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
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
    against: tuple[str, ...] = ()  # rows above that it is compared with, besides the first


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

    def points(self) -> Iterator[dict[str, float]]:
        """Yields the values of every row, by path."""
        points: Iterable[tuple[float, ...]] = product(*self.vary.values())
        if not self.full:
            usual = [_value(self.set, path) for path in self.vary]
            points = (
                (*usual[:i], value, *usual[i + 1 :]) for i, values in enumerate(self.vary.values()) for value in values
            )
        for values in dict.fromkeys(points):
            yield dict(zip(self.vary, values, strict=True))


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
            place = f"variants.{variant}" if variant else "recipe"
            variants[variant] = tuple(self._rows(merged(recipe, changes), place, make))
        return Sweep(name=self.name, about=self.about, seeds=self.seeds, variants=variants, paper=self.paper)

    def _rows(self, table: Table, place: str, make: Callable[[Table, str], Recipe]) -> Iterator[SweepRow]:
        """Yields the rows of one variant: the first row, the others, the grid, and controls last."""
        begun = None if self.continued is None else merged(table, {**self.continued, "begin_from": f"../{_FIRST}"})

        def row(changes: Table, place: str, *, scratch: bool, **others: Any) -> SweepRow:
            start = table if scratch or begun is None else begun
            made = make(merged(start, changes), place)
            if not isinstance(made, RowRecipe):
                raise UserError(f"{place}: runs of this family cannot be rows of a table; take another family")
            return SweepRow(recipe=made, scratch=start is table, **others)

        first = row({}, place, scratch=True, name=_FIRST, kind="base")
        first.recipe.check_first_row()
        yield first
        controls: list[SweepRow] = []
        for i, each in enumerate(self.rows):
            made = row(each.set, f"rows.{i}", scratch=each.scratch, name=each.name, kind="row", against=each.against)
            if each.control:
                controls.append(_control(each.name, [made]))
            yield made
        if grid := self.grid:
            points = []
            for values in grid.points():
                point = {path.split(".")[-1]: value for path, value in values.items()}
                name = ", ".join([grid.name, *(f"{key.replace('_', ' ')} {value:g}" for key, value in point.items())])
                changes = reduce(merged, (_nested(path, value) for path, value in values.items()), grid.set)
                points.append(row(changes, "grid", scratch=grid.scratch, name=name, kind="grid", point=point))
            yield from points
            if points and grid.control:
                controls.append(_control("grid", points))
        yield from controls


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
