"""Workers on many machines: tasks on a Ray cluster.

Ray reschedules a task when its worker or its whole node dies; a bounded number of tasks is in flight at a time.
All machines need the same version of this package and a shared disk that holds the run's folder.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, final

from freenergy.core.workers.pool import ITEMS_PER_WORKER, POLL_SECONDS, RETRIES, Results

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning about a future default
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # it would print dead workers to stdout
os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # by default it retries out-of-memory tasks for ever

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError

from freenergy.core.errors import UserError, first_line
from freenergy.core.progress import raise_if_stop_requested
from freenergy.core.workers.local import WorkerEnvironment, timed, worker_died_error
from freenergy.core.workers.pool import cores

_STORE = 80 << 20  # bytes of shared memory: the minimum that ray accepts,
_STORE_PER_WORKER = 48 << 20  # plus this per worker, whose items may hold some megabytes of text


@final
class RayPool:
    """Runs items on a Ray cluster; without an address, on a local one that lives as long as this object is open."""

    def __init__(self, address: str | None = None) -> None:
        self.cpu_seconds = 0.0
        self._environment = WorkerEnvironment.current()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(address or os.environ.get("RAY_ADDRESS"), self._environment.threads)
        # a task with several threads must fit on one machine
        max_cpus = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)
        self._cpus = max(1, min(self._environment.threads, int(max_cpus)))

    @property
    def size(self) -> int:
        """How many tasks the cluster runs concurrently, at its current size."""
        return max(1, int(ray.cluster_resources().get("CPU", 1)) // self._cpus)

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """Disconnect; shuts the cluster down if it was started here."""
        if self._is_ours:
            ray.shutdown()

    def map_unordered(self, do: Callable[[Any], Any], items: Iterable[Any]) -> Results:
        """Yield each item with ``do(item)``, in the order in which they finish."""
        task = ray.remote(num_cpus=self._cpus, max_retries=RETRIES)(_work)
        payload, remaining, in_flight = ray.put((self._environment, do)), iter(items), dict[Any, Any]()
        try:
            while True:
                while len(in_flight) < ITEMS_PER_WORKER * self.size and (given := list(islice(remaining, 1))):
                    in_flight[task.remote(payload, given[0])] = given[0]
                if not in_flight:
                    return
                done, _ = ray.wait(list(in_flight), timeout=POLL_SECONDS)
                raise_if_stop_requested()
                for ref in done:
                    item = in_flight.pop(ref)
                    yield item, self._result(ref, item)
        finally:
            for ref in in_flight:
                ray.cancel(ref)

    def _result(self, ref: Any, item: Any) -> Any:
        try:
            seconds, result, refusal = ray.get(ref)
        except RayTaskError:
            raise  # a bug of ours: keep its traceback
        except RaySystemError as error:
            raise UserError(f"the ray cluster is gone ({first_line(error)}): restart it, then run again") from None
        except RayError as error:
            raise worker_died_error(item, RETRIES + 1, first_line(error)) from None
        if refusal is not None:
            raise UserError(refusal)
        self.cpu_seconds += seconds
        return result


def _work(payload: tuple[WorkerEnvironment, Callable[[Any], Any]], item: Any) -> tuple[float, Any, str | None]:
    """Run in a worker: returns CPU seconds, the result, and the message of a ``UserError``, which Ray would wrap."""
    environment, do = payload
    try:
        environment.apply()
        return *timed(do, item), None
    except UserError as error:
        return 0.0, None, str(error)


def _connect(address: str | None, threads: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation warnings of ray itself
            if address is None:
                store_bytes = _STORE + cores() // threads * _STORE_PER_WORKER
                ray.init("local", num_cpus=cores(), include_dashboard=False, object_store_memory=store_bytes, **quiet)
            else:
                ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "start here" if address is None else f"be reached at {address}"
        raise UserError(
            f"no ray cluster could {where} ({first_line(error)}): start one with `ray start --head`, or use "
            "--workers local"
        ) from None
