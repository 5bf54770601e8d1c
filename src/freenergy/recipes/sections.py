"""The sections of a recipe, found by walking the fields of its family's dataclass; and what is wrong with them.

field: A | None, tuple[A | B, ...], Annotated[A | B, …]      →      the sections A, B, and theirs
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, NamedTuple, final, get_args, get_origin, get_type_hints

from freenergy.core.errors import UserError
from freenergy.training.settings import KEEP_DEFAULT


class SectionField(NamedTuple):
    """A field of a section, the section classes that its value may have, and the kind that it has by default.

    ``start`` are the keys that a table need not repeat, of a field with ``metadata=KEEP_DEFAULT``.
    """

    name: str
    choices: tuple[type, ...]
    default_kind: str | None
    start: Mapping[str, Any]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds to choose from; none where all values have one class."""
        return tuple(kind for each in self.choices if (kind := kind_of(each))) if len(self.choices) > 1 else ()


def section_fields(section: type) -> tuple[SectionField, ...]:
    """Returns the fields of a section."""
    hints, found = get_type_hints(section, include_extras=True), []
    for each in fields(section):
        default: Any = each.default_factory() if each.default_factory is not MISSING else each.default
        choices = tuple(dict.fromkeys(_classes(hints[each.name])))
        start = asdict(default) if KEEP_DEFAULT.items() <= each.metadata.items() else {}
        found.append(SectionField(each.name, choices, getattr(default, "kind", None), start))
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
    """Fill in the default kind where a table does not say of which kind it is; refuse where there is no default.

    A table that gives some keys of a field that keeps its default gets the others from there.
    """
    table = dict(table)
    for each in section_fields(section):
        value, place = table.get(each.name), f"{path}{each.name}"
        if isinstance(value, dict):
            table[each.name] = _with_kind({**each.start, **value}, each, place)
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


@final
class ErrorMessages:
    """Knows the sections that a recipe may have, to tell their names from keys and to guess what was meant."""

    def __init__(self, sections: Mapping[type, Sequence[SectionField]]) -> None:
        self.classes = {section.__name__: kind for section in sections if (kind := kind_of(section))}
        self.kinds = set(self.classes.values())
        known = [each for own in sections.values() for each in own]
        self.keys = sorted({each.name for each in known})
        self.unions = {each.name for each in known if each.kinds}
        # of a section that is one of several: which kinds have a key
        self.owners: dict[tuple[str, str], list[str]] = {}
        for union, choice in [(each, choice) for each in known if each.kinds for choice in each.choices]:
            for own in sections[choice]:
                self.owners.setdefault((union.name, own.name), []).append(str(kind_of(choice)))

    def sentence(self, errors: Sequence[Mapping[str, Any]], origin: str, table: Mapping[str, Any]) -> str:
        """The first complaint of pydantic, as one sentence with the path of the key."""
        # it tries every class of a union: what it says of the classes that the recipe did not mean is no complaint
        first = next((error for error in errors if self._is_meant(error["loc"], table)), errors[0])
        # after these keys, and in their lists, the path names the class or kind that was tried, which is no key
        before = ["", *first["loc"]]
        parts = [str(part) for last, part in zip(before, first["loc"], strict=False) if not self._is_kind(last, part)]
        path = ".".join(parts) or "the recipe"
        match first["type"]:
            case "unexpected_keyword_argument":
                return f"{origin}: unknown key {path}{self._near(*parts[-2:])}"
            case "missing" | "missing_argument":
                return f"{origin}: {path} is missing; set it in the recipe"
            case "value_error":
                return f"{origin}, {path}: {str(first['msg']).removeprefix('Value error, ')}"
            case "union_tag_invalid":
                known = first["ctx"]["expected_tags"]
                return f"{origin}: {path}.kind is {first['ctx']['tag']!r}; choose one of {known}"
            case "literal_error" if parts[-1] == "kind":
                tried = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
                return f"{origin}: {path} is {first['input']!r}; choose one of {', '.join(tried)}"
            case _:
                shown = repr(first["input"])[:60]
                return f"{origin}: {path} is {shown}: {first['msg'][0].lower()}{first['msg'][1:]}; change it"

    def _is_meant(self, loc: Sequence[str | int], table: Any) -> bool:
        """False where an error is about a class of another kind than the recipe names."""
        for part in loc:
            if part in self.classes and isinstance(table, dict):
                kind = table.get("kind")
                if isinstance(kind, str) and kind in self.kinds and kind != self.classes[str(part)]:
                    return False
            elif isinstance(table, dict | list) and (part not in self.kinds or part in table):  # base is a kind too
                table = table[part] if part in table or isinstance(part, int) else None  # type: ignore[index]
        return True

    def _is_kind(self, last: str | int, part: str | int) -> bool:
        return part in self.classes or (part in self.kinds and (last in self.unions or isinstance(last, int)))

    def _near(self, *names: str) -> str:
        key = names[-1]
        if len(names) > 1 and (kinds := self.owners.get((names[0], key))):
            return (
                f"; only {names[0]} of kind {' or '.join(sorted(set(kinds)))} has it: take it out, or change the kind"
            )
        # a key of another section is no help under its own name
        close = difflib.get_close_matches(key, [known for known in self.keys if known != key], n=1)
        return (
            f" (did you mean {close[0]}?)" if close else "; take it out, or see the docs for the keys of this section"
        )
