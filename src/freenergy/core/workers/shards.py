"""Prefetches the shards of a stage with workers.

    missing shards  →  workers make them, in any order  →  the stage finds them on disk, checks them and continues

The stage's own code alone decides what its result is; workers only save time. A worker loads models and corpus once
and keeps them for its next shards.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from freenergy.core.errors import UserError
from freenergy.core.files import host, remove_partial_files
from freenergy.core.progress import Progress
from freenergy.core.workers.pool import IN_PROCESS, InProcess, Results, WorkerPool


def map_unless_single(workers: WorkerPool, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
    """Like ``workers.map_unordered``, but processes a single item in this process."""
    remaining = iter(items)
    first = list(islice(remaining, 2))
    yield from (workers if len(first) > 1 else IN_PROCESS).map_unordered(do, chain(first, remaining))


@runtime_checkable
class ShardMaker(Protocol):
    """Builds any shard of a stage."""

    def make(self, item: Any) -> None:
        """Make a shard, unless it exists already."""


class ShardJob(NamedTuple):
    """How a worker loads what it makes shards from: ``load(folder, *arguments)``, once per worker for equal jobs."""

    load: Callable[..., ShardMaker]  # a function of a module
    folder: Path
    arguments: tuple[Any, ...]  # they must identify what is in the folder, such as a stage's key


def is_worth_parallelising(workers: WorkerPool, items: Sequence[Any]) -> bool:
    """Whether workers would save time: there are some, and more than one item."""
    return not isinstance(workers, InProcess) and len(items) > 1


def prefetch_shards(
    workers: WorkerPool, job: ShardJob, items: Sequence[Any], out: Path, label: str, progress: Progress
) -> None:
    """Let workers make these shards below ``out``, if that saves time."""
    if not is_worth_parallelising(workers, items):
        return
    try:
        with (
            progress.track(f"{label}, {workers.size} workers", len(items), "shards") as advance,
            closing(workers.map_unordered(partial(_make, job), items)) as results,
        ):
            for _ in results:
                advance(1)
    finally:
        remove_partial_files(out)  # left by killed workers


def _make(job: ShardJob, item: Any) -> None:
    _loaded(job).make(item)


@lru_cache(maxsize=2)
def _loaded(job: ShardJob) -> ShardMaker:
    if not job.folder.is_dir():
        raise UserError(f"{host()} does not see {job.folder}: workers on several machines need a shared disk")
    return job.load(job.folder, *job.arguments)
