"""Engines of one machine: all items once, whatever happens to workers, and the same bytes from all."""

import os
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import engine_tasks as tasks
from freenergy import UserError
from freenergy.core.progress import Interrupted, Silent, handle_sigterm
from freenergy.core.workers import pool, shards
from freenergy.core.workers.local import ProcessPool, WorkerEnvironment
from freenergy.core.workers.pool import RETRIES, InProcess, worker_pool


def test_here_works_in_order_and_takes_one_item_at_a_time():
    taken = []
    results = InProcess().map_unordered(tasks.square, tasks.taking(range(5), taken))
    assert next(results) == (0, 0)
    assert taken == [0]
    assert list(results) == [(x, x * x) for x in range(1, 5)]
    with pytest.raises(UserError, match="three is refused"):
        list(InProcess().map_unordered(tasks.refuse_three, range(5)))


def test_here_stops_when_it_is_asked_to():
    done = []
    with handle_sigterm(), pytest.raises(Interrupted):
        tasks.asked_to_stop(InProcess(), done)
    assert done == [0]


@pytest.mark.parametrize(
    "name", ["", "locale", "local:", "local:0", "local:x", "local:-1", "ray:", "spark", "local:9999"]
)
def test_unknown_names_of_workers(name):
    with pytest.raises(UserError, match="--workers"):
        worker_pool(name)


def test_local_leaves_cores_to_threads(monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 6)
    for threads, workers in ((1, 6), (2, 3), (4, 1), (12, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        engine = worker_pool("local")
        assert (engine.size, isinstance(engine, InProcess)) == (workers, workers == 1)
    assert isinstance(worker_pool("local:1"), InProcess)
    assert worker_pool("local:5").size == worker_pool("5").size == 5


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "freenergy.core.workers.ray", None)
    with pytest.raises(UserError, match=r"pip install 'freenergy\[ray\]'"):
        worker_pool("ray")


def test_a_worker_takes_over_its_surroundings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TEST_OF_WORKERS", "1")
    here = WorkerEnvironment.current()
    monkeypatch.delenv("HF_TEST_OF_WORKERS")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.chdir("/")
    here.apply()
    assert (os.environ["HF_TEST_OF_WORKERS"], Path.cwd()) == ("1", tmp_path)
    assert "RANK" not in os.environ
    with pytest.raises(UserError, match=r"install the same version"):
        WorkerEnvironment(1, (), "/", "0.0.0-other").apply()


def test_one_item_is_not_worth_a_worker():
    with ProcessPool(2) as pool:
        assert list(shards.map_unless_single(pool, tasks.process, [5])) == [(5, os.getpid())]
        assert list(shards.map_unless_single(pool, tasks.process, [])) == []
        assert not shards.is_worth_parallelising(pool, [1])
        assert shards.is_worth_parallelising(pool, [1, 2])
    assert not shards.is_worth_parallelising(InProcess(), [1, 2])


def test_a_folder_that_a_worker_does_not_see(tmp_path):
    job = shards.ShardJob(tasks.shards, tmp_path / "elsewhere", ())
    with pytest.raises(UserError, match="need a shared disk"):
        shards._make(job, 0)


class Fragile:
    """An executor all of whose first futures break, as those of a killed worker and its siblings do."""

    def __init__(self, doomed):
        self.doomed, self.ended, self._processes = doomed, 0, {}

    def submit(self, timed, do, item):
        future = Future()
        self.doomed -= 1
        future.set_result((0.0, do(item))) if self.doomed < 0 else future.set_exception(BrokenProcessPool())
        return future

    def shutdown(self, **how):
        self.ended += 1


@pytest.mark.parametrize(("doomed", "is_given_up"), [(8, False), (8 + RETRIES - 1, False), (8 + RETRIES, True)])
def test_waiting_to_be_tried_again_is_no_death(monkeypatch, doomed, is_given_up):
    """Eight items are in hand when a worker dies; then they are tried one at a time, the last one first."""
    pool, executor = ProcessPool(4), Fragile(doomed)

    def started(pool):
        pool._executor = executor
        return executor

    monkeypatch.setattr(ProcessPool, "_started", started)
    with pytest.raises(UserError, match=f"died {RETRIES + 1} times") if is_given_up else nullcontext():
        found = list(pool.map_unordered(tasks.square, range(20)))
        assert sorted(found) == [(x, x * x) for x in range(20)]
        assert executor.ended == 1 + doomed - 8


def test_a_pool(tmp_path):
    """One pool for all of it, since processes take seconds to start."""
    with ProcessPool(2) as pool:
        taken = []
        results = pool.map_unordered(tasks.square, tasks.taking(range(9), taken))
        first = next(results)
        assert len(taken) <= 4, "no more than two a worker are taken ahead"
        assert sorted([first, *results]) == [(x, x * x) for x in range(9)]
        assert os.getpid() not in {found for _, found in pool.map_unordered(tasks.process, range(4))}
        assert pool.cpu_seconds > 0
        with pytest.raises(UserError, match="three is refused"):
            list(pool.map_unordered(tasks.refuse_three, range(9)))

        honest = tasks.drawn(InProcess(), tasks.draw, tmp_path / "here")
        assert len(honest) == 8
        assert tasks.drawn(pool, tasks.draw, tmp_path / "pool") == honest
        assert tasks.drawn(pool, tasks.draw_by_worker, tmp_path / "mutant") != honest

        (tmp_path / "tries").mkdir()
        found = sorted(
            item for item, _ in pool.map_unordered(partial(tasks.die_at_first, tmp_path / "tries"), range(9))
        )
        assert found == list(range(9))
        assert len(list((tmp_path / "tries").glob("3-*"))) == 2

        done = []
        with handle_sigterm(), pytest.raises(Interrupted):
            tasks.asked_to_stop(pool, done)
        assert len(done) < 5


@pytest.mark.faults
def test_an_item_that_kills_every_worker_is_given_up():
    with (
        ProcessPool(2) as pool,
        pytest.raises(UserError, match=r"workers died 4 times .* item 3 .*fewer workers"),
    ):
        list(pool.map_unordered(tasks.die_always, range(9)))


def test_make_ahead_leaves_this_process_alone(tmp_path):
    job = shards.ShardJob(tasks.shards, tmp_path, ())
    shards.prefetch_shards(InProcess(), job, [0, 1], tmp_path, "draws", Silent())
    assert list(tmp_path.iterdir()) == []
