"""Files are compared with their checksums when they are read, so that a turned bit is a sentence and not a number.

A finished folder has a manifest (``stage.json``, or ``flat.json`` of a flat copy) with the SHA-256 of all its files.
Whoever reads such a file calls ``intact`` first: it hashes the file, once per process while the file stays as it is.
Files of a folder that is not finished, or that older versions wrote without checksums, pass.
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.hashing import file_hash, fingerprint

STAGE, FLAT = "stage.json", "flat.json"  # the names of manifests
FILES, DIGEST = "files", "mark"  # keys on disk
_LEVELS = 5  # folders between a file and its manifest


def digest_matches(record: dict[str, Any]) -> bool:
    """Whether a manifest is unchanged since it was written; one of an older version, without checksums, passes."""
    rest = {key: value for key, value in record.items() if key != DIGEST}
    return record.get(DIGEST) == fingerprint(rest) or not {FILES, DIGEST} & set(record)


def intact(path: Path) -> Path:
    """Return a path that may be read; raise ``UserError`` if its file, or one below a folder, is not as it was written.

    Links are not followed out of the folder that the manifest describes.
    """
    for folder in list(path.parents)[:_LEVELS]:
        for name in (STAGE, FLAT):
            if path.name not in (STAGE, FLAT) and (folder / name).is_file():
                _check(path, folder, _manifest(folder / name, _stamp(folder / name)))
                return path
    return path


def _check(path: Path, folder: Path, files: dict[str, str]) -> None:
    own = str(path.relative_to(folder))
    for name, value in files.items():
        if name == own or name.startswith(f"{own}{os.sep}"):
            found = folder / name
            if not found.is_file() or not found.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{found} is missing or leads elsewhere: {_remedy(folder)}")
            if _hash(found, _stamp(found)) != value:
                raise UserError(f"{found} is not as it was written, it does not match its checksum: {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    return f"copy it again from where it was made, or delete {folder} and run the recipe again"


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@lru_cache(maxsize=4096)
def _hash(path: Path, stamp: tuple[int, ...]) -> str:
    return file_hash(path)


@lru_cache(maxsize=256)
def _manifest(path: Path, stamp: tuple[int, ...]) -> dict[str, str]:
    """Return the checksums in a manifest; raise ``UserError`` if it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = record.get(FILES, {})
        if not digest_matches(record) or not all(isinstance(value, str) for value in files.values()):
            raise ValueError("its digest does not match")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): {_remedy(path.parent)}") from None
    return {str(name): value for name, value in files.items()}
