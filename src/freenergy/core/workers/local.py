"""Workers of one machine: a pool of processes.

    copied from the coordinator: number of torch threads, environment variables, working directory, package version

A worker applies these before it imports anything that reads them, so that both compute the same bits.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path
from typing import Any, NamedTuple, final

from freenergy.core.errors import UserError
from freenergy.core.files import host
from freenergy.core.progress import Interrupted, raise_if_stop_requested
from freenergy.core.workers.pool import ITEMS_PER_WORKER, POLL_SECONDS, RETRIES, Results

_COPIED_PREFIXES = ("FREENERGY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TQDM_", "OMP_", "MKL_", "XDG_")
# a worker is not a rank of torchrun, even if a rank started it
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class WorkerEnvironment(NamedTuple):
    """The settings of the coordinator process that its workers copy."""

    threads: int
    environment: tuple[tuple[str, str], ...]
    folder: str
    version: str

    @classmethod
    def current(cls) -> "WorkerEnvironment":
        """Read the settings of this process."""
        import torch

        copied = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_COPIED_PREFIXES)))
        return cls(torch.get_num_threads(), copied, str(Path.cwd()), version("freenergy"))

    def apply(self) -> None:
        """Apply them to this process, before anything that reads the environment is imported."""
        if version("freenergy") != self.version:
            raise UserError(
                f"a worker on {host()} has freenergy {version('freenergy')}, the coordinator {self.version}: install "
                "the same version everywhere"
            )
        for name in _TORCHRUN:
            os.environ.pop(name, None)
        # the tokenizers library would use all cores in each worker
        os.environ.update({**dict(self.environment), "TOKENIZERS_PARALLELISM": "false"})
        if Path(self.folder).is_dir():
            os.chdir(self.folder)  # recipes may name files relative to it
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


@dataclass(slots=True)
class _Given:
    """An item that was given to a worker."""

    item: Any
    deaths: int = 0


_InFlight = dict[Future[tuple[float, Any]], _Given]


@final
class ProcessPool:
    """A pool of processes; a killed worker breaks the executor, which is restarted with what was not finished."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UserError(f"a pool needs at least 1 worker, not {workers}: use 1 or more")
        self.size, self.cpu_seconds = workers, 0.0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """Shut down: at once after an error; after a stop request the workers finish their current shards."""
        self._shut_down(kill=kind is not None and not issubclass(kind, Interrupted))

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in the order in which they finish."""
        remaining, in_flight = iter(items), _InFlight()
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
        self, do: Callable[[Any], Any], remaining: Iterator[Any], lost: list[_Given], in_flight: _InFlight
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

    def _restart(self, broken: list[_Given], in_flight: _InFlight) -> list[_Given]:
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


def timed(do: Callable[[Any], Any], item: Any) -> tuple[float, Any]:
    """Return the CPU seconds that ``do(item)`` took, and its result."""
    start = time.process_time()
    result = do(item)
    return time.process_time() - start, result


def worker_died_error(item: Any, times: int, why: str) -> UserError:
    """Return the error for an item whose workers keep dying."""
    name = str(item) if len(str(item)) < 40 else f"{str(item)[:40]}…"
    return UserError(
        f"workers died {times} times while processing item {name} ({why}), probably out of memory: use fewer workers "
        "(--workers local:N) or smaller shards, then run the command again"
    )
