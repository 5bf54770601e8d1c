"""Downloads named resources into a cache.

    name → cache, if it is there → the first route whose content has the right checksum → cache

A resource enters the cache atomically and under a lock. The cache is ``$FREENERGY_CACHE``, else
``$XDG_CACHE_HOME/freenergy``, else ``~/.cache/freenergy``. ``$FREENERGY_RESOURCES/NAME/`` is a folder to fill by hand
for a machine without network; it is tried before any other route.
"""

import difflib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import filelock

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, file_hash, read_json, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.corpus.resources.routes import RouteError, follow, from_folder, snapshot
from freenergy.corpus.resources.table import RESOURCES, Resource

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = {".txt", ".raw", ".json", ".jsonl", ".parquet", ".gz", ".zst", ".gguf", ".safetensors", ".tsv", ".csv"}
_WANTED = ("*.safetensors", "*.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_NEVER = ("*.bin", "*.py", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5", "*.onnx")

_Attempt = Callable[[Path], None]


class ResourceUnavailable(UserError):  # noqa: N818
    """No route worked; the message lists the routes and why each failed."""


class ChecksumError(UserError):
    """Content that does not match the table's checksum."""


def cache_folder() -> Path:
    """Return where fetched resources are kept."""
    if own := os.environ.get("FREENERGY_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "freenergy"


def is_cached(name: str) -> bool:
    """Whether every file is in the cache with the right size."""
    resource, folder = named(name), _place(name)
    return all((folder / f.name).is_file() and (folder / f.name).stat().st_size == f.size for f in resource.files)


def fetch(name: str, progress: Progress | None = None, *, verify: bool = False) -> Path:
    """Return the folder in the cache that holds a named resource, fetched if it is not there yet.

    The checksums of a cached copy are compared whenever its files have been touched since they were, and with
    ``verify`` always.
    """
    resource, place = named(name), _place(name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache {place.parent} cannot be created ({error.strerror}): set FREENERGY_CACHE to a writable folder"
        ) from error
    with filelock.FileLock(place.parent / f".{name}.lock"):
        if place.exists():
            is_known = not verify and _read_stamps(place) == _stamps(resource, place)
            check(resource, place, remedy=f"delete the folder {place} and run the command again", hashes=not is_known)
        else:
            _fill(resource, place, progress or Silent())
            is_known = False
        if not is_known:
            with suppress(OSError):  # a cache that cannot be written is hashed each time
                write_json(_stamp_file(place), _stamps(resource, place))
    return place


def _stamps(resource: Resource, place: Path) -> dict[str, list[int]]:
    """What a file shows without being read; it changes whenever a program writes the file."""
    found = {file.name: place / file.name for file in resource.files if (place / file.name).is_file()}
    seen = {name: path.stat() for name, path in found.items()}
    return {name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in seen.items()}


def _stamp_file(place: Path) -> Path:
    return place.with_name(f".{place.name}.json")


def _read_stamps(place: Path) -> dict[str, Any] | None:
    try:
        return read_json(_stamp_file(place))
    except UserError:
        return None


def locate(name: str, progress: Progress | None = None) -> Path:
    """Return a path that exists, the files of a known name, or a snapshot of a Hugging Face repository ``org/name``.

    Of a repository, weights as safetensors, JSON and tokenizer files are downloaded, and never pickles or code.
    """
    if not name:
        raise UserError("the name of a text or model is empty: give a path, a known name or a Hugging Face id")
    path = Path(name).expanduser()
    if name in RESOURCES:
        if path.exists() and progress is not None:
            progress.say(f"{name} is the known resource; for the file or folder here, write ./{name}")
        return fetch(name, progress)
    if path.exists():
        return path
    is_path = path.is_absolute() or name.startswith((".", "~")) or path.suffix.lower() in _FILE_ENDINGS
    if not is_path and _HUB_ID.fullmatch(name):
        return _from_hub(name, progress or Silent())
    if is_path or "/" in name:
        raise UserError(f"there is no file or folder {name}: check the path")
    raise _unknown(name)


def listing() -> list[dict[str, Any]]:
    """Return all resources, for the table and for ``--json``."""
    return [
        {
            "name": resource.name,
            "kind": resource.kind,
            "size": resource.size,
            "licence": resource.licence,
            "cached": is_cached(resource.name),
            "routes": ["local folder", *(route.label for route in resource.routes)],
            "description": resource.description,
        }
        for resource in RESOURCES.values()
    ]


def named(name: str) -> Resource:
    """Return the table's entry for a name."""
    if name not in RESOURCES:
        raise _unknown(name)
    return RESOURCES[name]


def check(resource: Resource, folder: Path, *, remedy: str, hashes: bool = True) -> None:
    """Compare the files of a folder with the table."""
    for file in resource.files:
        path = folder / file.name
        if not path.is_file():
            raise ChecksumError(f"{resource.name} is incomplete, {path} is missing: {remedy}")
        size = path.stat().st_size
        if size != file.size and not hashes:
            raise ChecksumError(f"the size of {path} differs: expected {file.size} bytes, got {size}; {remedy}")
        if hashes and (got := file_hash(path)) != file.sha256:
            label = f"{resource.name}/{file.name}"
            raise ChecksumError(f"the checksum of {label} differs: expected {file.sha256}, got {got}; {remedy}")


def _fill(resource: Resource, place: Path, progress: Progress) -> None:
    """Try the routes in order; the first with the right content becomes the cached copy."""
    for stale in place.parent.glob(f".{place.name}.*.part"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    failures: list[str] = []
    differs: ChecksumError | None = None
    for label, attempt in _attempts(resource, progress):
        try:
            with atomic_write(place) as temporary:
                temporary.mkdir()
                attempt(temporary)
                check(resource, temporary, remedy=f"it came by {label}, which has another version or a damaged one")
        except RouteError as error:
            failures.append(f"{label}: {error}")
        except ChecksumError as error:
            progress.say(f"{error}; trying the next route")
            failures.append(f"{label}: other content")
            differs = error
        else:
            progress.say(f"{resource.name}: fetched by {label} into {place}")
            return
    if differs is not None:
        raise differs
    raise ResourceUnavailable(
        f"{resource.name} cannot be fetched ({'; '.join(failures)}): connect to a network, or put its files "
        f"({', '.join(file.name for file in resource.files)}) into $FREENERGY_RESOURCES/{resource.name}"
    )


def _attempts(resource: Resource, progress: Progress) -> Sequence[tuple[str, _Attempt]]:
    routes = [(route.label, partial(follow, route, resource, progress=progress)) for route in resource.routes]
    if not (local := os.environ.get("FREENERGY_RESOURCES")):
        return routes
    return [("local folder", partial(from_folder, Path(local).expanduser() / resource.name, resource)), *routes]


def _from_hub(name: str, progress: Progress) -> Path:
    try:
        folder = snapshot(name, patterns=_WANTED, never=_NEVER)
    except RouteError as error:
        near = _near(name)
        raise ResourceUnavailable(
            f"there is no path {name}, and the Hugging Face hub did not return it ({error}): check the spelling{near}, "
            "or download it elsewhere and give its folder"
        ) from error
    progress.say(f"{name}: Hugging Face hub, {folder}")
    return folder


def _unknown(name: str) -> UserError:
    return UserError(
        f"{name!r} is neither a path, nor a known name{_near(name)}, nor a Hugging Face id (org/name): "
        f"known names are {', '.join(RESOURCES)}"
    )


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), RESOURCES, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _place(name: str) -> Path:
    return cache_folder() / "resources" / name
