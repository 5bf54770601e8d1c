"""Fingerprints of values and hashes of files."""

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(value: Any) -> str:
    """Identify a JSON-like value by its content: 16 hexadecimal digits of SHA-256 over its canonical form.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
