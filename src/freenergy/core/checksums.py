"""Checksums of a folder's files, so that corruption on disk is detected.

    manifest of a folder = summary + {file: SHA-256 of its bytes} + digest of the manifest itself

Stages have such a manifest (``stage.json``), and so have the flat copies of negatives (``flat.json``). The digest is
checked whenever a manifest is read, the files by ``freenergy verify``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, fingerprint, read_json, write_json
from freenergy.core.progress import SILENT, Progress

STAGE, FLAT = "stage.json", "flat.json"
_FILES, _DIGEST = "files", "mark"  # keys on disk
_KEPT = ("features", "evaluations")  # folders of a run outside of any stage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of ``verify``.

    ``rerun`` lists the folders to delete if files are damaged: those of their stages, and of every stage that may have
    read them since. ``without_checksums`` lists stages of older versions, which kept none.
    """

    files: int
    bytes: int
    stages: tuple[str, ...]
    damaged: tuple[str, ...]
    rerun: tuple[str, ...]
    without_checksums: tuple[str, ...]


def write_with_checksums(path: Path, record: dict[str, Any], progress: Progress = SILENT) -> None:
    """Write the manifest of a folder as its last file, with a checksum per file; hidden files are skipped."""
    names = {each: each.relative_to(path.parent) for each in sorted(path.parent.rglob("*")) if each.is_file()}
    seen = [each for each, name in names.items() if each != path and not any(p.startswith(".") for p in name.parts)]
    record = record | {
        _FILES: {str(names[each]): value for each, value in _hashes(seen, "computing checksums", progress)}
    }
    write_json(path, record | {_DIGEST: fingerprint(record)})


def digest_matches(record: dict[str, Any]) -> bool:
    """Whether a manifest is unchanged since it was written; one of an older version, without checksums, passes."""
    rest = {key: value for key, value in record.items() if key != _DIGEST}
    return record.get(_DIGEST) == fingerprint(rest) or not {_FILES, _DIGEST} & set(record)


def verify(run: Path, progress: Progress = SILENT) -> Verification:
    """Read every file of a run's finished stages and compare its checksum with the manifest."""
    stages = {path.parent.name: read_json(path) for path in sorted(run.glob(f"*/{STAGE}"))}
    if not stages:
        raise UserError(f"{run} has no finished stage: give a folder that `freenergy run` wrote")
    damaged, files, size = list[str](), dict[Path, str](), 0
    for path, record in _records(run, stages):
        if digest_matches(record):
            files |= {path.parent / name: value for name, value in record.get(_FILES, {}).items()}
        else:
            damaged.append(str(path))
    for path, value in _hashes(files, "reading files", progress):
        size += path.stat().st_size if value else 0
        if value != files[path]:
            damaged.append(str(path))
    return Verification(
        files=len(files),
        bytes=size,
        stages=tuple(stages),
        damaged=tuple(sorted(damaged)),
        rerun=_readers(run, stages, {Path(path).relative_to(run).parts[0] for path in damaged}),
        without_checksums=tuple(name for name, record in stages.items() if _DIGEST not in record),
    )


def _hashes(paths: Iterable[Path], label: str, progress: Progress) -> Iterator[tuple[Path, str]]:
    """Yield each file with its SHA-256, or with an empty string if the file is missing."""
    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in paths}
    with progress.track(label, sum(sizes.values()), "bytes") as advance:
        for path, size in sizes.items():
            yield path, file_hash(path) if path.is_file() else ""
            advance(size)


def _records(run: Path, stages: dict[str, dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for name, record in stages.items():
        yield run / name / STAGE, record
        for path in sorted((run / name).rglob(FLAT)):
            yield path, read_json(path)


def _readers(run: Path, stages: dict[str, dict[str, Any]], damaged: set[str]) -> tuple[str, ...]:
    """Return these stages, all stages that read them, directly or not, and the cached measurements."""
    read = {name: record.get("after") for name, record in stages.items()}
    rerun, wider = set[str](), set(damaged)
    while wider != rerun:
        rerun = wider
        wider = rerun | {name for name, before in read.items() if isinstance(before, dict) and rerun & set(before)}
    kept = [name for name in _KEPT if rerun != damaged and (run / name).is_dir()]
    return (*(name for name in stages if name in rerun), *kept)
