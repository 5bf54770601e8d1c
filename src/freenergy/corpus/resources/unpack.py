"""How one file is taken out of what a route delivers.

    content = unpack(delivered)

Each way reads a binary stream and writes the content that the checksum is about.
"""

import ast
import gzip
import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

import pyarrow.parquet as pq

Stream = IO[bytes] | io.BufferedIOBase  # an open file, or a member of an archive


@final
@dataclass(frozen=True, slots=True)
class Uncompressed:
    """The bytes as they are."""

    def __call__(self, source: Stream, target: Path) -> None:
        """Copy."""
        with target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)


@final
@dataclass(frozen=True, slots=True)
class Gunzip:
    """The bytes without their gzip."""

    def __call__(self, source: Stream, target: Path) -> None:
        """Decompress."""
        with gzip.open(source) as content, target.open("wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetLines:
    """A column of lines, joined: ``before`` + line + ``after``, and ``blank`` for an empty one."""

    column: str
    before: str = ""
    after: str = ""
    blank: str = ""

    def __call__(self, source: Stream, target: Path) -> None:
        """Join the rows in their order."""
        with target.open("wb") as file:
            for batch in pq.ParquetFile(source).iter_batches(columns=[self.column]):
                for line in batch.column(0).to_pylist():
                    file.write((f"{self.before}{line}{self.after}" if line else self.blank).encode())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedString:
    """The string that a Python source assigns to ``variable[key]``: the source is parsed, never run.

    The text ends with one newline, however many the quotes left.
    """

    variable: str
    key: str

    def __call__(self, source: Stream, target: Path) -> None:
        """Find the assignment."""
        for node in ast.parse(source.read()).body:
            match node:
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=self.variable), slice=ast.Constant(value=self.key))],
                    value=ast.Constant(value=str(text)),
                ):
                    target.write_bytes(f"{text.rstrip(chr(10))}\n".encode())
                    return
        raise KeyError(f"{self.variable}[{self.key!r}]")


Unpack = Uncompressed | Gunzip | ParquetLines | AssignedString
