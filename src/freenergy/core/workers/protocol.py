"""An engine runs workers.

    each(do, items)  →  (item, do(item)) …      in the order in which they end

Every slow stage writes shards that appear whole or not at all, and draws its randomness by the shard. So an engine need
not be careful: what was lost with a worker is done again, and what was done twice has the same bytes.
"""

from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

Results = Generator[tuple[Any, Any], None, None]
RETRIES = 3  # times that an item whose worker has died is given to another
AHEAD = 2  # items given out for each worker: one in hand and one to go on with
PATIENCE = 0.5  # seconds between two looks at whether to stop


@runtime_checkable
class Engine(Protocol):
    """Someone who calls a function on many items; a context manager that ends the workers."""

    @property
    def workers(self) -> int:
        """How many items are worked on at a time."""
        ...

    @property
    def spent(self) -> float:
        """CPU seconds of other processes so far."""
        ...

    def each(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Each item with what ``do`` makes of it, as they end.

        ``do`` is a function of a module, or a ``functools.partial`` of one. Items are taken when there is a worker for
        them, so they may be made lazily. A ``UserError`` of a worker is raised here. Between results it is asked
        whether to stop.
        """
        ...

    def __enter__(self) -> "Engine": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
