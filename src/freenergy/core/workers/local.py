"""Workers of one machine: this process itself, or a pool of processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_end
from types import TracebackType
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.interrupt import Interrupted, raise_if_stop_requested
from freenergy.core.workers.protocol import ITEMS_PER_WORKER, POLL_SECONDS, RETRIES, Results
from freenergy.core.workers.worker import WorkerEnvironment, timed, worker_died_error


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No workers to shut down."""


@dataclass(slots=True)
class _Given:
    """An item that was given to a worker."""

    item: Any
    deaths: int = 0


@final
class ProcessPool:
    """A pool of processes, started with the first item.

    A killed worker breaks the whole executor: it is restarted, and what was not finished is submitted again.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UserError(f"a pool needs at least 1 worker, not {workers}: use 1 or more")
        self.size, self.cpu_seconds = workers, 0.0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down: at once after an error; after a stop request the workers finish their current shards."""
        self._shut_down(kill=kind is not None and not issubclass(kind, Interrupted))

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in the order in which they finish."""
        remaining, in_flight = iter(items), dict[Future[tuple[float, Any]], _Given]()
        lost: list[_Given] = []
        try:
            while self._submit(do, remaining, lost, in_flight):
                done, _ = wait(in_flight, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                raise_if_stop_requested()
                broken: list[_Given] = []
                for future in done:
                    given = in_flight.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        broken.append(given)
                        continue
                    seconds, result = future.result()
                    self.cpu_seconds += seconds
                    yield given.item, result
                if broken:
                    lost += self._restart(broken, in_flight)
        except UserError:
            self._shut_down(kill=True)  # no worker may still write when the error is reported
            raise
        finally:
            for future in in_flight:
                future.cancel()

    def _submit(
        self,
        do: Callable[[Any], Any],
        remaining: Iterator[Any],
        lost: list[_Given],
        in_flight: dict[Future[tuple[float, Any]], _Given],
    ) -> bool:
        """Fill the window: lost items first and one at a time, which shows which item kills its worker."""
        while len(in_flight) < (
            1 if lost or any(g.deaths for g in in_flight.values()) else ITEMS_PER_WORKER * self.size
        ):
            given = lost.pop() if lost else next((_Given(item) for item in remaining), None)
            if given is None:
                break
            try:
                in_flight[self._started().submit(timed, do, given.item)] = given
            except BrokenProcessPool:
                lost += self._restart([given], in_flight)
        return bool(in_flight)

    def _restart(self, broken: list[_Given], in_flight: dict[Future[tuple[float, Any]], _Given]) -> list[_Given]:
        """Close a broken executor; returns what it has not finished, each with one more death on its count."""
        self._shut_down(kill=True)
        unfinished = [future for future in in_flight if future.cancelled() or future.exception() is not None]
        lost = [*broken, *(in_flight.pop(future) for future in unfinished)]
        _count_deaths(lost)
        return lost

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
            self._executor = ProcessPoolExecutor(self.size, context, _set_up, (WorkerEnvironment.current(),))
        return self._executor

    def _shut_down(self, *, kill: bool) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if kill:
            for process in list((executor._processes or {}).values()):
                process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _count_deaths(lost: list[_Given]) -> None:
    raise_if_stop_requested()  # a signal to the whole process group concerns this process too
    for given in lost:
        given.deaths += 1
        if given.deaths > RETRIES:
            raise worker_died_error(given.item, given.deaths, "killed")


def _set_up(environment: WorkerEnvironment) -> None:
    """Set up a worker: it ignores SIGINT, which the parent handles, and exits with its parent, even a killed one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    environment.apply()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_end([parent.sentinel])
    os._exit(1)
