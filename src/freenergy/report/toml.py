"""Writes a recipe as TOML; None is left out, since TOML has no null."""

import json
from typing import Any


def to_toml(table: dict[str, Any]) -> str:
    """Return TOML with values first, then one section per table.

    >>> print(to_toml({"name": "a", "base": {"kind": "ngram", "order": 3, "path": None}}))
    name = "a"
    <BLANKLINE>
    [base]
    kind = "ngram"
    order = 3
    """
    return "\n".join(_lines(table, ())).strip()


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    values = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    lines = ["", f"[{'.'.join(path)}]"] if path and values else []
    lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _lines(value, (*path, key))
    return lines


def _value(value: Any) -> str:
    match value:
        case bool() | str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            pairs = (f"{key} = {_value(inner)}" for key, inner in value.items() if inner is not None)
            return f"{{ {', '.join(pairs)} }}"
        case _:
            return repr(value)
