"""Files that appear whole or not at all, and the fingerprints that name what is in them.

A file is written beside its place, flushed to disk and renamed: a reader, or the same command after ``kill -9``, sees
the old file, the new file, or none.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock, Timeout

from freenergy.core.errors import UserError

if TYPE_CHECKING:  # slow to import, and only some read arrays
    import numpy as np
    from torch import Tensor

_PART = ".part"
_SAFETENSORS_PART = ".tmp??????"  # what that library writes to before it renames
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a path to write to; on success it is renamed to ``path``, on failure nothing is left.

    >>> with atomic_write(Path("runs/a.txt")) as aside:  # doctest: +SKIP
    ...     aside.write_text("all of it")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{host()}.{os.getpid()}{_PART}")
    try:
        with disk_full_as_user_error(path):
            yield aside
            flush(aside)
            if path.is_dir():
                shutil.rmtree(path)
            aside.replace(path)
            flush(path.parent)
    finally:
        _remove(aside)


@cache
def host() -> str:
    """The name of this machine: on a disk that several share, a process id alone names nobody."""
    return re.sub(r"[^\w-]", "-", platform.node()) or "host"


def own_folder(folder: str | Path, mark: str) -> Path:
    """A folder that may be written anew: absent, empty, or with the file ``mark`` that says whose it is."""
    path = Path(folder).resolve()
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / mark).is_file()):
        raise UserError(f"{path} holds something else than what is to be saved (no {mark}): choose another folder")
    return path


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes were writing below a folder that nobody else is working in."""
    for pattern in (f".*{_PART}", _SAFETENSORS_PART):
        for part in sorted(folder.rglob(pattern)):
            _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_full_as_user_error(path: Path) -> Iterator[None]:
    """Turn 'no space left' in any of its forms into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise no_room(path) from error
        raise
    except Exception as error:
        # safetensors and arrow wrap the system's error in exceptions of their own; the code survives in the text
        if any(f"os error {code}" in str(error) or f"[Errno {code}]" in str(error) for code in _NO_ROOM):
            raise no_room(path) from error
        raise


def no_room(path: Path) -> UserError:
    """Say that the disk is full."""
    return UserError(f"no room on disk to write {path}: free some space or choose another folder, then run it again")


def flush(path: Path) -> None:
    """Make a file, a folder's files, or a rename survive a power cut."""
    if path.is_dir() and path.suffix == _PART:
        for child in path.rglob("*"):
            flush(child)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all, with sorted keys so that equal values are equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


class _MissingError(UserError, KeyError):
    """A KeyError for those who expect one, templates among them."""

    __str__ = Exception.__str__


class _Record(dict[str, Any]):
    """A JSON object of a file; asked for what it does not have, it says so in one sentence."""

    def __init__(self, values: Any = (), path: Path | None = None) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise _MissingError(f"{self._path} has no {key!r}: delete it and run the stage that makes it again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say in one sentence why not."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=lambda values: _Record(values, path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the path, or run the stage that makes it") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of digits, brackets within brackets
        raise UserError(f"{path} is not JSON ({error}): delete it and run the stage that makes it again") from None
    if not isinstance(value, _Record):
        raise UserError(f"{path} holds no JSON object: delete it and run the stage that makes it again")
    return value


def parse_line(text: str, where: str) -> Any:
    """The JSON value in a line that a user wrote, or one sentence that says ``where`` it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}, column {error.colno}): mend or remove the line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise UserError(f"{where} is beyond what JSON readers take ({error}): mend or remove the line") from None


def parse_texts(text: str, where: str) -> Any:
    """The same, where all strings of the value have to be text."""
    value = parse_line(text, where)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has half of a surrogate pair, which is no text: mend or remove the line") from None
    except RecursionError as error:
        raise UserError(f"{where} is beyond what JSON writers take ({error}): mend or remove the line") from None
    return value


@contextmanager
def corruption_as_user_error(path: Path, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises for a damaged file of ``path`` into one sentence that names it."""
    try:
        yield
    except (UserError, AssertionError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UserError(f"{path} is damaged or of another version ({reason}): {remedy}") from error


AGAIN = "delete it and run the same command again"


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Read a safetensors file, or say in one sentence why not."""
    from safetensors.torch import load_file

    with corruption_as_user_error(path, AGAIN):
        return _Record(load_file(path), path)


def read_arrays(path: Path) -> "dict[str, np.ndarray]":
    """The same, as arrays of numpy."""
    from safetensors.numpy import load_file

    with corruption_as_user_error(path, AGAIN):
        return _Record(load_file(path), path)


@contextmanager
def exclusive_file_lock(path: Path) -> Iterator[None]:
    """Two processes that write the same file would mix their lines."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is writing {path}: wait for it, or choose another file") from None
    except OSError as error:
        raise UserError(f"cannot write to {path.parent} ({error.strerror}): choose another file") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # first: who has opened it meanwhile sees that it is gone
        lock.release()


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Two processes that work in one folder would write over each other."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is running in {folder}: wait for it, or choose another --out") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): choose another --out") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def resumable_jsonl(path: Path, key: Any) -> Iterator["ResumableLines"]:
    """JSON lines that are added one by one and appear as ``path`` when all are there; the same ``key`` goes on.

    >>> with resumable_jsonl(Path("out.jsonl"), {"seed": 0}) as lines:  # doctest: +SKIP
    ...     for i in range(lines.done, 10):
    ...         lines.add({"i": i})
    """
    aside = path.with_name(f".{path.name}.{fingerprint(key)}{_PART}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file to write")
    with exclusive_file_lock(path), disk_full_as_user_error(path), aside.open("ab+") as file:
        yield ResumableLines(file)
        flush(aside)
        aside.replace(path)
        flush(path.parent)


class ResumableLines:
    """Lines so far; a torn last one is cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.done, end = file, 0, 0
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            self.done, end = self.done + 1, end + len(line)
        file.truncate(end)

    def add(self, value: Any) -> None:
        """One more line, on disk before the next is begun."""
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += 1


def fingerprint(value: Any) -> str:
    """Name a JSON-like value by its content: 16 hexadecimal digits of SHA-256 over its canonical form."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
