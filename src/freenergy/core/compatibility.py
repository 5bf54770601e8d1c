"""What a release promises to read (docs/compatibility.md).

A result is named by what decides its numbers: settings, inputs, and the version of the algorithm that made it. The
version of the package is not among them, so a release with a fix elsewhere redoes nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError

ERA = "0.1.0"  # part of every key; another one only with a major release, which reads no older runs
FORMAT = 1  # of the files of a stage; a later release reads this and all before
_KEY = "format"


def with_format(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a result together with the format of its files."""
    return {**record, _KEY: FORMAT}


def check_format(record: Mapping[str, Any], path: Path) -> None:
    """Raise ``UserError`` for files of a format that only later releases read; before there was a number it was 1."""
    found = record.get(_KEY, 1)
    if not isinstance(found, int) or found > FORMAT:
        raise UserError(
            f"{path} is of a later release (format {found}, this one reads up to {FORMAT}): install a newer freenergy"
        )
