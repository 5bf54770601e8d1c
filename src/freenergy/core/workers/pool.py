"""Pools of workers, and the one that ``--workers NAME`` selects.

    map_unordered(do, items)  →  (item, do(item)) …      in the order in which they finish

    local           cores // torch threads processes; if that is one, no extra process
    local:N, N      N processes
    ray             the cluster at RAY_ADDRESS, or a local one that lives as long as the command
    ray:ADDRESS     the cluster at this address, as ``ray start --head`` prints it

Every slow stage writes shards atomically and derives its randomness from the shard, not from the worker. So a pool may
simply repeat the work of a worker that died: whatever is computed twice has the same bytes. The bits of a sum may
depend on the number of torch threads, so each worker uses as many as the coordinator: set OMP_NUM_THREADS=1 to turn
the remaining cores into workers.
"""

import os
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol, final, runtime_checkable

from freenergy.core.errors import UserError
from freenergy.core.progress import raise_if_stop_requested

Results = Generator[tuple[Any, Any], None, None]
RETRIES = 3  # an item whose worker died is retried this many times
ITEMS_PER_WORKER = 2  # in flight: one being processed and one queued
POLL_SECONDS = 0.5  # between two checks whether to stop


@runtime_checkable
class WorkerPool(Protocol):
    """Calls a function on many items; a context manager that shuts its workers down on exit."""

    @property
    def size(self) -> int:
        """How many items are processed concurrently."""

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that other processes have spent so far."""

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in the order in which they finish.

        ``do`` is a function of a module, or a ``functools.partial`` of one (it is pickled). ``items`` is consumed
        lazily, as workers become free. A ``UserError`` of a worker is raised here. Raises ``Interrupted`` between
        results once a stop was requested.
        """

    def __enter__(self) -> "WorkerPool": ...

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None: ...


@final
class InProcess:
    """Processes items in this process, one after another."""

    size = 1
    cpu_seconds = 0.0

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in order."""
        for item in items:
            raise_if_stop_requested()
            yield item, do(item)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """No workers to shut down."""


IN_PROCESS = InProcess()


def worker_pool(name: str) -> WorkerPool:
    """Return the worker pool of this name; use it as a context manager.

    >>> worker_pool("local:1").size
    1
    """
    kind, _, rest = (f"local:{name}" if name.isdecimal() else name).partition(":")
    if kind == "local":
        import torch

        from freenergy.core.workers.local import ProcessPool

        is_given = rest or name.endswith(":")
        size = _number(rest, name) if is_given else max(1, cores() // torch.get_num_threads())
        return InProcess() if size == 1 else ProcessPool(size)
    if kind != "ray" or name == "ray:":
        raise UserError(f"--workers {name!r} is unknown: choose local, local:N, ray or ray:ADDRESS")
    try:
        from freenergy.core.workers.ray import RayPool
    except ImportError:
        raise UserError("--workers ray needs the ray package: pip install 'freenergy[ray]'") from None
    return RayPool(rest or None)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UserError(f"--workers {name!r} needs a number of workers from 1 to 4096: write local:4, for example")
    return int(text)
