"""An engine of many machines: tasks on a Ray cluster.

Ray gives a task to another worker when its worker or its whole node dies; only so many tasks are given out at a time.
All machines have this package and see the run's folder on a disk that they share.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from types import TracebackType
from typing import Any, final

from freenergy.core.workers.protocol import AHEAD, PATIENCE, RETRIES, Results

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of what will change
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # it would tell of workers that died on stdout
os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # it would try what memory does not hold for ever

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError

from freenergy.core.errors import UserError
from freenergy.core.interrupt import check
from freenergy.core.workers.open import cores
from freenergy.core.workers.worker import Surroundings, given_up, timed

_STORE = 80 << 20  # bytes of shared memory, the least that ray takes, and
_STORE_A_WORKER = 48 << 20  # more for each worker, whose items may hold some megabytes of text


@final
class Cluster:
    """Workers of a Ray cluster; without an address one of this machine, for as long as it is open."""

    def __init__(self, address: str | None = None) -> None:
        self.spent = 0.0
        self._surroundings = Surroundings.here()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(address or os.environ.get("RAY_ADDRESS"), self._surroundings.threads)
        # a task of several threads has to fit a machine
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)
        self._cpus = max(1, min(self._surroundings.threads, int(most)))

    @property
    def workers(self) -> int:
        """How many tasks the cluster runs at a time, as large as it is now."""
        return max(1, int(ray.cluster_resources().get("CPU", 1)) // self._cpus)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cluster, and end it where it was started here."""
        if self._is_ours:
            ray.shutdown()

    def each(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Each item with what ``do`` makes of it, as they end."""
        task = ray.remote(num_cpus=self._cpus, max_retries=RETRIES)(_work)
        what, left, at_work = ray.put((self._surroundings, do)), iter(items), dict[Any, Any]()
        try:
            while True:
                while len(at_work) < AHEAD * self.workers and (given := list(islice(left, 1))):
                    at_work[task.remote(what, given[0])] = given[0]
                if not at_work:
                    return
                done, _ = ray.wait(list(at_work), timeout=PATIENCE)
                check()
                for ref in done:
                    item = at_work.pop(ref)
                    yield item, self._result(ref, item)
        finally:
            for ref in at_work:
                ray.cancel(ref)

    def _result(self, ref: Any, item: Any) -> Any:
        try:
            seconds, result, wrong = ray.get(ref)
        except RayTaskError:
            raise  # a fault of ours, with its traceback
        except RaySystemError as error:
            raise UserError(f"the ray cluster is gone ({_first_line(error)}): start it and run this again") from None
        except RayError as error:
            raise given_up(item, RETRIES + 1, _first_line(error)) from None
        if wrong is not None:
            raise UserError(wrong)
        self.spent += seconds
        return result


def _work(what: tuple[Surroundings, Callable[[Any], Any]], item: Any) -> tuple[float, Any, str | None]:
    """In a worker: CPU seconds and result, or what a user has to be told; Ray would wrap that in a traceback."""
    surroundings, do = what
    try:
        surroundings.enter()
        return *timed(do, item), None
    except UserError as error:
        return 0.0, None, str(error)


def _connect(address: str | None, threads: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own future
            if address is None:
                room = _STORE + cores() // threads * _STORE_A_WORKER
                ray.init("local", num_cpus=cores(), include_dashboard=False, object_store_memory=room, **quiet)
            else:
                ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "start here" if address is None else f"be reached at {address}"
        raise UserError(
            f"no ray cluster could {where} ({_first_line(error)}): start one with `ray start --head`, or take "
            "--engine local"
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
