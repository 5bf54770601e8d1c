"""The sections of a recipe, found by walking the fields of its family's dataclass.

field: A | None, tuple[A | B, ...], Annotated[A | B, …]      →      the sections A, B, and theirs
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from freenergy.core.errors import UserError


class SectionField(NamedTuple):
    """A field of a section, the section classes that its value may have, and the kind that it has by default."""

    name: str
    choices: tuple[type, ...]
    default_kind: str | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds to choose from; none where all values have one class."""
        return tuple(kind for each in self.choices if (kind := kind_of(each))) if len(self.choices) > 1 else ()


def section_fields(section: type) -> tuple[SectionField, ...]:
    """Returns the fields of a section."""
    hints, found = get_type_hints(section, include_extras=True), []
    for each in fields(section):
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        choices = tuple(dict.fromkeys(_classes(hints[each.name])))
        found.append(SectionField(each.name, choices, getattr(default, "kind", None)))
    return tuple(found)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    if get_origin(hint) is dict:  # its keys are names, not those of a section
        return
    for argument in get_args(hint):
        yield from _classes(argument)


def kind_of(section: type) -> str | None:
    """Returns what a section calls itself, where it is one of several."""
    return next((str(each.default) for each in fields(section) if each.name == "kind"), None)


def all_sections(root: type) -> dict[type, tuple[SectionField, ...]]:
    """Returns the root and every section below it, each with its fields."""
    found: dict[type, tuple[SectionField, ...]] = {}
    todo = [root]
    while todo:
        section = todo.pop()
        if section not in found:
            found[section] = section_fields(section)
            todo += [choice for each in found[section] for choice in each.choices]
    return found


def with_kinds(table: Mapping[str, Any], section: type, path: str = "") -> dict[str, Any]:
    """Fill in the default kind where a table does not say of which kind it is; refuse where there is no default."""
    table = dict(table)
    for each in section_fields(section):
        value, place = table.get(each.name), f"{path}{each.name}"
        if isinstance(value, dict):
            table[each.name] = _with_kind(value, each, place)
        elif isinstance(value, list | tuple):
            table[each.name] = [
                _with_kind(item, each, f"{place}.{i}") if isinstance(item, dict) else item
                for i, item in enumerate(value)
            ]
    return table


def _with_kind(value: dict[str, Any], each: SectionField, path: str) -> dict[str, Any]:
    if each.kinds and "kind" not in value:
        if each.default_kind is None:
            raise UserError(f"{path} has no kind; choose one of {', '.join(map(repr, each.kinds))}")
        value = {"kind": each.default_kind, **value}
    chosen = [choice for choice in each.choices if not each.kinds or kind_of(choice) == value.get("kind")]
    return with_kinds(value, chosen[0], f"{path}.") if len(chosen) == 1 else value
