"""Engines of one machine: this process, and a pool of processes beside it."""

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
from freenergy.core.interrupt import Stopped, check
from freenergy.core.workers.protocol import AHEAD, PATIENCE, RETRIES, Results
from freenergy.core.workers.worker import Surroundings, given_up, timed


@final
class Here:
    """The process itself, one item after another."""

    workers = 1
    spent = 0.0

    def each(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Each item with what ``do`` makes of it, in order."""
        for item in items:
            check()
            yield item, do(item)

    def __enter__(self) -> "Here":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nobody to end."""


@dataclass(slots=True)
class _Given:
    """An item that some worker has, or had."""

    item: Any
    deaths: int = 0


@final
class Pool:
    """Processes that are started when there is first something to do.

    One that is killed takes the executor's others with it; they are started anew and given what was not finished.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UserError(f"a pool of {workers} workers was asked for: take 1 or more")
        self.workers, self.spent = workers, 0.0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers; who is only asked to stop lets them finish the shards in hand."""
        self._end(batch_size=kind is not None and not issubclass(kind, Stopped))

    def each(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Each item with what ``do`` makes of it, as they end."""
        left, at_work = iter(items), dict[Future[tuple[float, Any]], _Given]()
        lost: list[_Given] = []
        try:
            while self._give_out(do, left, lost, at_work):
                done, _ = wait(at_work, timeout=PATIENCE, return_when=FIRST_COMPLETED)
                check()
                broken: list[_Given] = []
                for future in done:
                    given = at_work.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        broken.append(given)
                        continue
                    seconds, result = future.result()
                    self.spent += seconds
                    yield given.item, result
                if broken:
                    lost += self._begin_anew(broken, at_work)
        except UserError:
            self._end(batch_size=True)  # nobody writes any more when the refusal is told
            raise
        finally:
            for future in at_work:
                future.cancel()

    def _give_out(
        self,
        do: Callable[[Any], Any],
        left: Iterator[Any],
        lost: list[_Given],
        at_work: dict[Future[tuple[float, Any]], _Given],
    ) -> bool:
        """Fill the window, with what was lost first and one at a time: so it is clear whose fault the next death is."""
        while len(at_work) < (1 if lost or any(g.deaths for g in at_work.values()) else AHEAD * self.workers):
            given = lost.pop() if lost else next((_Given(item) for item in left), None)
            if given is None:
                break
            try:
                at_work[self._started().submit(timed, do, given.item)] = given
            except BrokenProcessPool:
                lost += self._begin_anew([given], at_work)
        return bool(at_work)

    def _begin_anew(self, broken: list[_Given], at_work: dict[Future[tuple[float, Any]], _Given]) -> list[_Given]:
        """Close a broken executor; what it has not finished, each with one death more."""
        self._end(batch_size=True)
        unfinished = [future for future in at_work if future.cancelled() or future.exception() is not None]
        lost = [*broken, *(at_work.pop(future) for future in unfinished)]
        _count_deaths(lost)
        return lost

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
            self._executor = ProcessPoolExecutor(self.workers, context, _begin, (Surroundings.here(),))
        return self._executor

    def _end(self, *, batch_size: bool) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if batch_size:
            for process in list((executor._processes or {}).values()):
                process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _count_deaths(lost: list[_Given]) -> None:
    check()  # who ends a whole group of processes means this one too
    for given in lost:
        given.deaths += 1
        if given.deaths > RETRIES:
            raise given_up(given.item, given.deaths, "killed")


def _begin(surroundings: Surroundings) -> None:
    """Set up a worker: it leaves interrupts to its parent, and ends with it, even where that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    surroundings.enter()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_end([parent.sentinel])
    os._exit(1)
