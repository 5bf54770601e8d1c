"""The role of a pool of workers.

    map_unordered(do, items)  →  (item, do(item)) …      in the order in which they finish

Every slow stage writes shards atomically and derives its randomness from the shard, not from the worker. So a pool may
simply repeat the work of a worker that died: whatever is computed twice has the same bytes.
"""

from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

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
        ...

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that other processes have spent so far."""
        ...

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in the order in which they finish.

        ``do`` is a function of a module, or a ``functools.partial`` of one (it is pickled). ``items`` is consumed
        lazily, as workers become free. A ``UserError`` of a worker is raised here. Raises ``Interrupted`` between
        results once a stop was requested.
        """
        ...

    def __enter__(self) -> "WorkerPool": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
