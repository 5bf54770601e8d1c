"""Seals: what was left in a folder, so that a bit that turns later is noticed.

    record of a folder = what is told of it, files = {name: SHA-256 of its bytes}, mark = fingerprint of all the rest

Stages have such a record (``stage.json``), and so have the flat copies of negatives (``flat.json``). The mark is looked
at whenever a record is read. The files are not, since that would read all of a large model: ``freenergy verify`` does
it when someone asks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, fingerprint, read_json, write_json
from freenergy.core.progress import Progress, Silent

STAGE, FLAT = "stage.json", "flat.json"
_FILES, _MARK = "files", "mark"
_KEPT = ("features", "evaluations")  # folders of a run that belong to no stage
_SILENT = Silent()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found.

    ``again`` are the folders to delete where files are damaged: of their stages, and of all that may have read them
    since. ``unsealed`` are stages that were made before there were seals.
    """

    files: int
    bytes: int
    stages: tuple[str, ...]
    damaged: tuple[str, ...]
    again: tuple[str, ...]
    unsealed: tuple[str, ...]


def write_with_checksums(path: Path, record: dict[str, Any], progress: Progress = _SILENT) -> None:
    """Write the record of a folder as the last of its files; hidden ones have records of their own, or none."""
    names = {each: each.relative_to(path.parent) for each in sorted(path.parent.rglob("*")) if each.is_file()}
    seen = [each for each, name in names.items() if each != path and not any(p.startswith(".") for p in name.parts)]
    record = record | {_FILES: {str(names[each]): value for each, value in _hashes(seen, "sealing", progress)}}
    write_json(path, record | {_MARK: fingerprint(record)})


def digest_matches(record: dict[str, Any]) -> bool:
    """Whether a record is what was written; one with neither files nor mark is older than seals."""
    rest = {key: value for key, value in record.items() if key != _MARK}
    return record.get(_MARK) == fingerprint(rest) or not {_FILES, _MARK} & set(record)


def verify(run: Path, progress: Progress = _SILENT) -> Verified:
    """Read every file that the finished stages of a run have left, and compare."""
    stages = {path.parent.name: read_json(path) for path in sorted(run.glob(f"*/{STAGE}"))}
    if not stages:
        raise UserError(f"{run} has no finished stage: give the folder that `freenergy run` made")
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
    return Verified(
        files=len(files),
        bytes=size,
        stages=tuple(stages),
        damaged=tuple(sorted(damaged)),
        again=_readers(run, stages, {Path(path).relative_to(run).parts[0] for path in damaged}),
        unsealed=tuple(name for name, record in stages.items() if _MARK not in record),
    )


def _hashes(paths: Iterable[Path], label: str, progress: Progress) -> Iterator[tuple[Path, str]]:
    """Each file with its SHA-256, which is empty where there is none."""
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
    """These stages and all that read them, directly or not; then what was kept of other measurements."""
    read = {name: record.get("after") for name, record in stages.items()}
    again, wider = set[str](), set(damaged)
    while wider != again:
        again = wider
        wider = again | {name for name, before in read.items() if isinstance(before, dict) and again & set(before)}
    kept = [name for name in _KEPT if again != damaged and (run / name).is_dir()]
    return (*(name for name in stages if name in again), *kept)
