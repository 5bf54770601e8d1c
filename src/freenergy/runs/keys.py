"""Keys: names of what a result is made of.

    key = fingerprint(version, name, settings that differ from their defaults, other inputs, keys of what was read)

A setting with its default value does not count, so a new setting with a default leaves the keys of old results alone.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from freenergy.core.files import fingerprint

_KIND = "kind"  # says which class of a union it is, so it counts always


def key_of(*parts: Any) -> str:
    """Returns the key of a result of these parts; settings may be dataclasses, alone or in lists and dicts."""
    return fingerprint([package_version("freenergy"), *(without_defaults(part) for part in parts)])


def without_defaults(value: Any) -> Any:
    """Returns JSON-like values, where dataclasses keep their kind and the fields that differ from their defaults.

    >>> from freenergy.lm.settings import NgramBase
    >>> without_defaults([NgramBase(), NgramBase(order=3)])
    [{'kind': 'ngram'}, {'kind': 'ngram', 'order': 3}]
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = [each for each in fields(value) if each.name == _KIND or getattr(value, each.name) != _default(each)]
        return {each.name: without_defaults(getattr(value, each.name)) for each in kept}
    if isinstance(value, Mapping):
        return {str(key): without_defaults(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_defaults(each) for each in value]
    return value


def _default(each: "Field[Any]") -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


@cache
def package_version(package: str) -> str:
    """Returns the version of an installed package."""
    return version(package)
