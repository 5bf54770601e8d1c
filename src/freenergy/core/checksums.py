"""Checksums of a folder's files, so that corruption on disk is detected.

    manifest of a folder = summary + {file: SHA-256 of its bytes} + digest of the manifest itself

Stages have such a manifest (``stage.json``), and so have the flat copies of negatives (``flat.json``). A file is
compared with its checksum when it is read (``core.intact``), and all files by ``freenergy verify``. A checksum finds
accidents; against people there is a signature (``core.signing``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, fingerprint, read_json, read_tensors, write_json
from freenergy.core.intact import DIGEST as _DIGEST
from freenergy.core.intact import FILES as _FILES
from freenergy.core.intact import FLAT as FLAT
from freenergy.core.intact import STAGE as STAGE
from freenergy.core.intact import digest_matches as digest_matches
from freenergy.core.progress import SILENT, Progress

RECIPE = "recipe.json"
_FEATURES, _EVALUATIONS = "features", "evaluations"  # folders of a run outside of any stage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of ``verify``.

    ``rerun`` lists the folders to delete if files are damaged: those of their stages, and of every stage that may have
    read them since. ``unknown`` lists files that no stage wrote, ``without_checksums`` what older versions wrote.
    """

    files: int
    bytes: int
    stages: tuple[str, ...]
    damaged: tuple[str, ...]
    unknown: tuple[str, ...]
    rerun: tuple[str, ...]
    without_checksums: tuple[str, ...]


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object together with its own digest, which ``without_digest`` compares."""
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain | {_DIGEST: fingerprint(plain)}


def without_digest(record: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what was given to ``with_digest``; a record of older versions, without a digest, passes."""
    plain = {key: value for key, value in record.items() if key != _DIGEST}
    if _DIGEST in record and record[_DIGEST] != fingerprint(plain):
        raise UserError(f"{path} is not as it was written: run the recipe again, which writes it")
    return plain


def write_with_checksums(path: Path, record: dict[str, Any], progress: Progress = SILENT) -> None:
    """Write the manifest of a folder as its last file, with a checksum per file; hidden files are skipped."""
    names = {each: name for each, name in visible_files(path.parent).items() if each != path}
    record = record | {
        _FILES: {str(names[each]): value for each, value in _hashes(names, "computing checksums", progress)}
    }
    write_json(path, record | {_DIGEST: fingerprint(record)})


def visible_files(folder: Path) -> dict[Path, Path]:
    """Return the files below a folder that are not hidden, with their names in it."""
    names = {each: each.relative_to(folder) for each in sorted(folder.rglob("*")) if each.is_file()}
    return {each: name for each, name in names.items() if not any(part.startswith(".") for part in name.parts)}


def manifests(run: Path) -> dict[Path, dict[str, Any]]:
    """Return the manifests of a run's finished folders, which may be damaged."""
    paths = [*sorted(run.glob(f"*/{STAGE}")), *sorted(run.glob(f"{_EVALUATIONS}/*/{STAGE}"))]
    paths = [path for path in paths if not path.parent.name.startswith(".")]
    flat = [found for path in paths for found in sorted(path.parent.rglob(FLAT))]
    return {path: read_json(path) for path in (*paths, *flat)}


def verify(run: Path, progress: Progress = SILENT) -> Verification:
    """Read every file of a run's finished stages and compare its checksum with the manifest."""
    records = manifests(run)
    stages = {path.parent.name: record for path, record in records.items() if path.parent.parent == run}
    if not stages:
        raise UserError(f"{run} has no finished stage: give a folder that `freenergy run` wrote")
    damaged, files, size = _damaged_records(run, progress), dict[Path, str](), 0
    for path, record in records.items():
        named = record.get(_FILES, {})
        if digest_matches(record) and isinstance(named, dict) and all(_stays(path.parent, name) for name in named):
            files |= {path.parent / name: value for name, value in named.items()}
        else:
            damaged.append(str(path))
    for path, value in _hashes(files, "reading files", progress):
        size += path.stat().st_size if value else 0
        if value != files[path]:
            damaged.append(str(path))
    sealed = [path.parent for path, record in records.items() if path.name == STAGE and _DIGEST in record]
    known = {*files, *records}
    return Verification(
        files=len(files),
        bytes=size,
        stages=tuple(stages),
        damaged=tuple(sorted(damaged)),
        unknown=tuple(str(path) for folder in sealed for path in visible_files(folder) if path not in known),
        rerun=_readers(run, stages, {Path(path).relative_to(run).parts[0] for path in damaged} & set(stages)),
        without_checksums=tuple(name for name, record in stages.items() if _DIGEST not in record),
    )


def _stays(folder: Path, name: object) -> bool:
    """Whether a name in a manifest is that of a file in its folder, and no link leads out of it."""
    if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return False
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _damaged_records(run: Path, progress: Progress) -> list[str]:
    """Return the files outside of stages that do not match their own checksums: the recipe and cached features."""
    damaged = list[str]()
    try:
        without_digest(read_json(run / RECIPE), run / RECIPE)
    except UserError:
        damaged.append(str(run / RECIPE))
    features = sorted((run / _FEATURES).rglob("*.safetensors"))
    with progress.track("reading features", len(features), "files") as advance:
        for path in features:
            try:
                read_tensors(path)
            except UserError:
                damaged.append(str(path))
            advance(1)
    return damaged


def _hashes(paths: Iterable[Path], label: str, progress: Progress) -> Iterator[tuple[Path, str]]:
    """Yield each file with its SHA-256, or with an empty string if the file is missing."""
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in paths}
    with progress.track(label, sum(sizes.values()), "bytes") as advance:
        for path, size in sizes.items():
            yield path, file_hash(path) if path.is_file() else ""
            advance(size)


def _readers(run: Path, stages: dict[str, dict[str, Any]], damaged: set[str]) -> tuple[str, ...]:
    """Return these stages, all stages that read them, directly or not, and the cached measurements."""
    read = {name: record.get("after") for name, record in stages.items()}
    rerun, wider = set[str](), set(damaged)
    while wider != rerun:
        rerun = wider
        wider = rerun | {name for name, before in read.items() if isinstance(before, dict) and rerun & set(before)}
    kept = [name for name in (_FEATURES, _EVALUATIONS) if rerun != damaged and (run / name).is_dir()]
    return (*(name for name in stages if name in rerun), *kept)
