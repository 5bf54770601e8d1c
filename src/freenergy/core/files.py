"""Atomic writes, locks, resumable JSON lines, and fingerprints of contents.

A file is written under a temporary name, flushed to disk and renamed: a reader, or the same command after ``kill -9``,
sees the old file, the new file, or none.
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
from freenergy.core.hashing import file_hash as file_hash
from freenergy.core.hashing import fingerprint as fingerprint
from freenergy.core.intact import intact as intact

if TYPE_CHECKING:  # slow to import, and needed by few callers
    import numpy as np
    from torch import Tensor

_PART = ".part"
_SAFETENSORS_PART = ".tmp??????"  # temporary files of the safetensors library
_FIX = "fix or remove the line"
_REMAKE = "delete it and run the stage that makes it again"
_CHECKSUM = "sha256"  # in the metadata of a safetensors file
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it is renamed to ``path``, on failure nothing is left.

    >>> with atomic_write(Path("runs/a.txt")) as temporary:  # doctest: +SKIP
    ...     temporary.write_text("all of it")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{host()}.{os.getpid()}{_PART}")
    try:
        with disk_full_as_user_error(path):
            yield temporary
            flush(temporary)
            if path.is_dir():
                shutil.rmtree(path)
            temporary.replace(path)
            flush(path.parent)
    finally:
        _remove(temporary)


@cache
def host() -> str:
    """Return the name of this machine: on a shared disk, a process id alone does not identify a process."""
    return re.sub(r"[^\w-]", "-", platform.node()) or "host"


def overwritable_folder(folder: str | Path, marker: str) -> Path:
    """Return the resolved folder if it may be overwritten: it is missing, empty, or contains the file ``marker``."""
    path = Path(folder).resolve()
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / marker).is_file()):
        raise UserError(f"{path} contains other files (no {marker}), which would be overwritten: choose another folder")
    return path


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files of killed processes below a folder that no other process is using."""
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
    """Turn every form of 'no space left on device' into a ``UserError``."""
    try:
        yield
    except Exception as error:
        # safetensors and arrow wrap the system's error in their own exceptions; the error code survives in the text
        in_text = any(f"os error {code}" in str(error) or f"[Errno {code}]" in str(error) for code in _DISK_FULL)
        if in_text or (isinstance(error, OSError) and error.errno in _DISK_FULL):
            raise UserError(
                f"no space left to write {path}: free some space or choose another folder, then run it again"
            ) from error
        raise


def flush(path: Path) -> None:
    """Call fsync on a file, on a temporary folder with its files, or on a folder after a rename."""
    if path.is_dir() and path.suffix == _PART:
        for child in path.rglob("*"):
            flush(child)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with sorted keys so that equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


class _MissingError(UserError, KeyError):
    """Is also a KeyError, which some callers (such as templates) expect."""

    __str__ = Exception.__str__


class _Record(dict[str, Any]):
    """A JSON object from a file; a missing key raises a ``UserError`` that names the file."""

    def __init__(self, values: Any = (), path: Path | None = None) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise _MissingError(f"{self._path} has no {key!r}: {_REMAKE}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ``UserError`` if the file is missing or damaged."""
    try:
        value = json.loads(intact(path).read_text(encoding="utf-8"), object_hook=lambda values: _Record(values, path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the path, or run the stage that makes it") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # also: bad UTF-8, thousands of digits, deep nesting
        raise UserError(f"{path} is not valid JSON ({error}): {_REMAKE}") from None
    if not isinstance(value, _Record):
        raise UserError(f"{path} does not contain a JSON object: {_REMAKE}")
    return value


def parse_json_line(text: str, where: str) -> Any:
    """Parse a line that a user wrote as JSON; errors name the place, ``where``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON ({error.msg}, column {error.colno}): {_FIX}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, deep nesting
        raise UserError(f"{where} exceeds the limits of JSON parsers ({error}): {_FIX}") from None


def parse_json_text(text: str, where: str) -> Any:
    """Parse a line as JSON whose strings must all be encodable as UTF-8."""
    value = parse_json_line(text, where)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} contains half of a surrogate pair, which is not text: {_FIX}") from None
    except RecursionError as error:
        raise UserError(f"{where} exceeds the limits of JSON writers ({error}): {_FIX}") from None
    return value


@contextmanager
def corruption_as_user_error(path: Path, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises for a damaged file into a ``UserError`` that names ``path``."""
    try:
        yield
    except (UserError, AssertionError):
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not path.exists():
            raise UserError(f"there is no file {path}: {remedy}") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UserError(f"{path} is damaged or of another version ({reason}): {remedy}") from error


RERUN = "delete it and run the same command again"


def write_tensors(path: Path, tensors: "dict[str, Tensor]") -> None:
    """Write a safetensors file atomically, with a checksum of its content that ``read_tensors`` compares."""
    from safetensors.torch import save_file

    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={_CHECKSUM: _content_hash({k: v.numpy() for k, v in tensors.items()})})


def _content_hash(arrays: "dict[str, np.ndarray]") -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Read a safetensors file; raises ``UserError`` if it is damaged."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with corruption_as_user_error(path, RERUN):
        found = load_file(intact(path))
        with safe_open(path, framework="numpy") as file:
            checksum = (file.metadata() or {}).get(_CHECKSUM)
        if checksum is not None and checksum != _content_hash({k: v.numpy() for k, v in found.items()}):
            raise ValueError("its content does not match its checksum")
        return _Record(found, path)


def read_arrays(path: Path) -> "dict[str, np.ndarray]":
    """Read a safetensors file as numpy arrays."""
    from safetensors.numpy import load_file

    with corruption_as_user_error(path, RERUN):
        return _Record(load_file(intact(path)), path)


@contextmanager
def exclusive_lock(path: Path, *, is_file: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder, or a file while it is written; a ``UserError`` if another process has it."""
    folder = path.parent if is_file else path
    lock = FileLock(folder / (f".{path.name}.lock" if is_file else ".lock"), timeout=0)
    doing, other = (f"writing {path}", "file") if is_file else (f"running in {path}", "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is {doing}: wait for it, or choose another {other}") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): choose another {other}") from None
    try:
        yield
    finally:
        if is_file:  # before release: whoever opened it meanwhile sees that it is gone
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def resumable_jsonl(path: Path, key: Any) -> Iterator["ResumableLines"]:
    """Append JSON lines one by one to a temporary file that becomes ``path`` at the end; the same ``key`` resumes.

    >>> with resumable_jsonl(Path("out.jsonl"), {"seed": 0}) as lines:  # doctest: +SKIP
    ...     for i in range(lines.done, 10):
    ...         lines.add({"i": i})
    """
    temporary = path.with_name(f".{path.name}.{fingerprint(key)}{_PART}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file to write")
    with exclusive_lock(path, is_file=True), disk_full_as_user_error(path), temporary.open("ab+") as file:
        yield ResumableLines(file)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)


class ResumableLines:
    """The lines written so far; an incomplete last line is truncated."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.done, end = file, 0, 0
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            self.done, end = self.done + 1, end + len(line)
        file.truncate(end)

    def add(self, value: Any) -> None:
        """Append a line and fsync it."""
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += 1
