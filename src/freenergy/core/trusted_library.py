"""A compiled library in the cache: loaded only if this user made it, nobody else may write it, and its hash is right.

    NAME.so    the library          NAME.json    its SHA-256, written after it

Loading a library runs code. A cache may be shared, so a file of another owner, one that others may write, and one whose
content is not what was compiled are compiled again and never loaded.
"""

import ctypes
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, file_hash, read_json, write_json

_HASH = "sha256"


def loaded_library(path: Path, names: Iterable[str], compile_to: Callable[[Path], object]) -> ctypes.CDLL:
    """Return the library with these functions from the cache, compiled if it is not there or cannot be trusted."""
    if is_trusted(path):
        found = _opened(path, names)
        if found is not None:
            return found
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_own(path.parent):
        raise OSError(f"{path.parent} can be written by others")
    with atomic_write(path) as aside:
        compile_to(aside)
        aside.chmod(0o500)
    write_json(path.with_suffix(".json"), {_HASH: file_hash(path)})
    found = _opened(path, names) if is_trusted(path) else None
    if found is None:
        raise OSError(f"{path} was not compiled as it should be")
    return found


def is_trusted(path: Path) -> bool:
    """Whether a library is a file of this user, which others cannot write, with the hash that was kept of it."""
    if path.is_symlink() or not path.is_file() or not (_is_own(path) and _is_own(path.parent)):
        return False
    try:
        return bool(read_json(path.with_suffix(".json")).get(_HASH) == file_hash(path))
    except (UserError, OSError):
        return False


def _is_own(path: Path) -> bool:
    if not hasattr(os, "getuid"):
        return True
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _opened(path: Path, names: Iterable[str]) -> ctypes.CDLL | None:
    """Return the library, or None if it is of another system or lacks a function."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    return found if all(hasattr(found, name) for name in names) else None
