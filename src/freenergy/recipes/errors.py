"""What is wrong with a recipe, in one sentence: from the messages of pydantic to words for a person."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, final

from freenergy.recipes.sections import SectionField, kind_of


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
            elif isinstance(table, dict | list) and part not in self.kinds:
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
