"""Shards made ahead of the code that reads them.

    missing shards  →  workers make them, in any order  →  the stage finds them there, checks them and goes on

A stage's own code stays the one authority on what its result is: an engine only saves it time. A worker opens what it
makes shards of once, and keeps it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from freenergy.core.errors import UserError
from freenergy.core.files import host, remove_partial_files
from freenergy.core.progress import Progress
from freenergy.core.workers.local import Here
from freenergy.core.workers.protocol import Engine, Results


def each_of(engine: Engine, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
    """``engine.each``, but an item that is alone is not worth a worker."""
    left = iter(items)
    first = list(islice(left, 2))
    yield from (engine if len(first) > 1 else Here()).each(do, chain(first, left))


@runtime_checkable
class Maker(Protocol):
    """Someone who can make any shard of a stage."""

    def make(self, item: Any) -> None:
        """Make a shard, unless it is there."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Job:
    """How a worker opens what it makes shards of: ``open(folder, *arguments)``, a function of a module.

    Equal jobs are opened once, so the arguments name what is in the folder now, such as the key of a stage.
    """

    open: Callable[..., Maker]
    folder: Path
    arguments: tuple[Any, ...]


def is_worth(engine: Engine, items: Sequence[Any]) -> bool:
    """Whether workers would gain anything; this process alone would do no more than it does anyway."""
    return not isinstance(engine, Here) and len(items) > 1


def prefetch_shards(engine: Engine, job: Job, items: Sequence[Any], out: Path, label: str, progress: Progress) -> None:
    """Let the engine's workers make these shards below ``out``, where that is worth while."""
    if not is_worth(engine, items):
        return
    try:
        with (
            progress.track(f"{label}, {engine.workers} workers", len(items), "shards") as advance,
            closing(engine.each(partial(_make, job), items)) as results,
        ):
            for _ in results:
                advance(1)
    finally:
        remove_partial_files(out)  # what workers that were killed have left


def _make(job: Job, item: Any) -> None:
    _opened(job).make(item)


@lru_cache(maxsize=2)
def _opened(job: Job) -> Maker:
    if not job.folder.is_dir():
        raise UserError(
            f"{host()} does not see {job.folder}: an engine of several machines needs a disk that all of them share"
        )
    return job.open(job.folder, *job.arguments)
