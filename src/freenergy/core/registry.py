"""Parts by name, made from ``key=value`` settings.

    registry.find("gibbs")                                        the class, imported when it is asked for
    configured(Resampling, {"candidates": "64", "truncation.top_k": 10}, "the sampler resampling")

A part is a frozen dataclass: its fields are its settings, a field that is a dataclass has settings with a dot.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, cast, final, get_args, get_origin, get_type_hints

from freenergy.core.errors import UserError

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@final
class Registry(Generic[T]):
    """Names of classes of one role; "module:Class" is imported when it is asked for."""

    def __init__(self, role: str, places: Mapping[str, str]) -> None:
        self.role = role
        self._classes: dict[str, str | type[T]] = dict(places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def register(self, name: str, part: type[T]) -> None:
        """Add a class at run time; a name is given once."""
        if self._classes.get(name, part) is not part:
            raise UserError(f"there is a {self.role} {name!r} already: choose another name")
        self._classes[name] = part

    def find(self, name: str, *, allow_import: bool = False) -> type[T]:
        """Return the class of this name; with ``allow_import`` also that of any "module:Class"."""
        if name not in self._classes and not (allow_import and ":" in name):
            raise UserError(f"there is no {self.role} {name!r}: choose one of {', '.join(self)}")
        found = self._classes.get(name, name)
        return imported(found) if isinstance(found, str) else found


def imported(place: str) -> Any:
    """Return what "module:name" names, or say in one sentence why not."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{place} cannot be imported ({error}): write it as module:name, of a module that Python finds"
        ) from error


def configured(part: type[T], settings: Mapping[str, Any], what: str, **given: Any) -> T:
    """Make a dataclass from its settings by name, and fields that are given; ``what`` names it in refusals."""
    known = [name for name in setting_names(part) if name not in given]
    for name in settings:
        if name not in known:
            raise UserError(f"{what} has no setting {name!r}: it has {', '.join(known) or 'none'}")
    hints, values = get_type_hints(part), dict(given)
    for field in fields(cast(Any, part)):
        hint, dotted = hints[field.name], f"{field.name}."
        if field.name in given:
            continue
        if is_dataclass(hint):
            own = {name.removeprefix(dotted): value for name, value in settings.items() if name.startswith(dotted)}
            if own:
                values[field.name] = configured(cast(type[Any], hint), own, what)
        elif field.name in settings:
            values[field.name] = _value(field.name, settings[field.name], hint)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{what} needs {field.name}: set it, as in {field.name}=…")
    return part(**values)


def setting_names(part: type[Any]) -> list[str]:
    """Return the names of all settings, with a dot where they are inside another.

    >>> from freenergy.core.roles import Truncation
    >>> setting_names(Truncation)
    ['temperature', 'top_k', 'top_p']
    """
    names, hints = list[str](), get_type_hints(part)
    for field in fields(part):
        hint = hints[field.name]
        names += (
            [f"{field.name}.{inner}" for inner in setting_names(cast(type[Any], hint))]
            if is_dataclass(hint)
            else [field.name]
        )
    return names


def _value(name: str, given: Any, hint: Any) -> Any:
    """Read text as TOML and check the type; a whole number is a number too."""
    options = [*get_args(hint)] if get_origin(hint) in (Union, UnionType) else [hint]
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    value = _read(given) if isinstance(given, str) and str not in options and given not in choices else given
    if value in choices or any(_is(value, option) for option in options):
        return float(value) if float in options and isinstance(value, int) else value
    words = [*(repr(choice) for choice in choices), *(_WORDS[option] for option in options if option in _WORDS)]
    raise UserError(f"{name} is {given!r}: set it to {' or '.join(words)}")


def _is(value: Any, option: Any) -> bool:
    if isinstance(value, bool):
        return option is bool
    if option is float:
        return isinstance(value, int | float)
    return isinstance(option, type) and isinstance(value, option)


def _read(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
