"""A folder that resumes: before anything else is written into it, it names what it will be made of.

    key = fingerprint(era, name, settings that differ from their defaults, other inputs, keys of what was read)

    begun.json   {"key": …}    the folder holds a part, or all, of what has this key
    stage.json   {"key": …}    written last: the folder is finished
    replaced/NAME-KEY/         what NAME held before, under another key

A setting with its default value does not count, so a new setting with a default leaves the keys of old results alone.
Nothing is deleted to make room for something else: a folder of another key is moved to ``replaced``, and moved back
when its key is wanted again.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from freenergy.core.checksums import STAGE as DONE
from freenergy.core.compatibility import ERA
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, fingerprint, read_json, write_json

BEGUN, REPLACED = "begun.json", "replaced"
_KIND = "kind"  # says which class of a union it is, so it counts always


def begin(folder: Path, key: str, *, keep_others: bool = False) -> bool:
    """Prepare a folder for the work of ``key``; returns whether it holds a part of that work already.

    A folder that was begun with another key is set aside, or refused with ``keep_others``. One with files that no run
    has made is always refused.
    """
    if _begun_key(folder) == key:
        return True
    check_free(folder, key, keep_others=keep_others)
    if _is_ours(folder):
        set_aside(folder)
    if (kept := replaced(folder, key)).is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            folder.rmdir()
        kept.rename(folder)
        return True
    write_json(folder / BEGUN, {"key": key})
    return False


def check_free(folder: Path, key: str, *, keep_others: bool) -> None:
    """Refuse a folder in which the work of ``key`` must not begin."""
    if keep_others and _is_ours(folder) and _begun_key(folder) != key:
        raise UserError(
            f"{folder} was begun with other settings or other inputs: use those again, delete it, or choose another "
            "--out"
        )
    if folder.is_file() or (_visible(folder) and not _is_ours(folder)):
        raise UserError(f"{folder} holds files that no run has made: move them, or choose another --out")


def withdraw(folder: Path) -> None:
    """Take back the begun mark of a folder into which nothing was written after it, so that other work may begin."""
    if _visible(folder) == [BEGUN]:
        (folder / BEGUN).unlink()


def replaced(folder: Path, key: str) -> Path:
    """Return where the content of a folder is kept that has this key."""
    return folder.parent / REPLACED / f"{folder.name}-{key}"


def set_aside(folder: Path) -> None:
    """Move a folder to where its key is kept; one in which nothing was written is removed."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: replace it by the folder that it leads to, or remove it")
    if _visible(folder) == [BEGUN]:
        discard(folder)
        return
    kept = replaced(folder, _begun_key(folder) or str(read_json(folder / DONE)["key"]))
    if kept.is_dir():  # of an earlier time with the same key
        if (kept / DONE).is_file() and not (folder / DONE).is_file():
            discard(folder)
            return
        discard(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(kept)


def discard(folder: Path) -> None:
    """Remove a folder; a kill half-way leaves nothing that counts as done."""
    doomed = folder.with_name(f".{folder.name}.old.part")  # such names are removed when the next run starts
    folder.rename(doomed)
    shutil.rmtree(doomed)


def discard_replaced(folder: Path) -> bool:
    """Remove what a run has set aside; returns whether there was something."""
    if not (folder / REPLACED).is_dir():
        return False
    discard(folder / REPLACED)
    return True


def adopt(source: Path, folder: Path) -> None:
    """Make ``folder`` a copy of the finished folder ``source``, by hard links where the disk allows them."""
    begin(folder, str(read_json(source / DONE)["key"]))
    with atomic_write(folder) as aside:
        shutil.copytree(source, aside, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _begun_key(folder: Path) -> str | None:
    path = folder / BEGUN
    return read_json(path).get("key") if path.is_file() else None


def _is_ours(folder: Path) -> bool:
    return (folder / BEGUN).is_file() or (folder / DONE).is_file()


def _visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def key_of(*parts: Any) -> str:
    """Returns the key of a result of these parts; settings may be dataclasses, alone or in lists and dicts."""
    return fingerprint([ERA, *(without_defaults(part) for part in parts)])


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
