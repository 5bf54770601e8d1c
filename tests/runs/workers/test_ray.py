"""A Ray cluster of this machine: what a pool of processes promises, it promises too."""

import os
from functools import partial
from pathlib import Path

import pytest

import engine_tasks as tasks
from freenergy import UserError
from freenergy.core.progress import Interrupted, handle_sigterm
from freenergy.core.workers.pool import InProcess, worker_pool

pytestmark = pytest.mark.filterwarnings("ignore")  # of ray's own


@pytest.fixture(scope="module")
def cluster():
    """One for all tests, since it takes seconds to start."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # its workers import what they do from a folder that only this process knows
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(tasks.__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        with worker_pool("ray") as engine:
            yield engine


def test_every_item_once_and_few_ahead(cluster):
    taken = []
    results = cluster.map_unordered(tasks.square, tasks.taking(range(9), taken))
    first = next(results)
    assert len(taken) <= 2 * cluster.size, "no more than two a worker are taken ahead"
    assert sorted([first, *results]) == [(x, x * x) for x in range(9)]
    assert os.getpid() not in {found for _, found in cluster.map_unordered(tasks.process, range(4))}
    assert cluster.cpu_seconds > 0


def test_a_refusal_is_the_same_sentence(cluster):
    with pytest.raises(UserError, match="three is refused"):
        list(cluster.map_unordered(tasks.refuse_three, range(9)))


def test_the_same_bytes_as_here_and_a_mutant(cluster, tmp_path):
    honest = tasks.drawn(InProcess(), tasks.draw, tmp_path / "here")
    assert tasks.drawn(cluster, tasks.draw, tmp_path / "ray") == honest
    assert tasks.drawn(cluster, tasks.draw_by_worker, tmp_path / "mutant") != honest


def test_what_a_killed_worker_had_in_hand_is_given_to_another(cluster, tmp_path):
    found = sorted(item for item, _ in cluster.map_unordered(partial(tasks.die_at_first, tmp_path), range(9)))
    assert found == list(range(9))
    assert len(list(tmp_path.glob("3-*"))) == 2


def test_it_stops_when_it_is_asked_to(cluster):
    done = []
    with handle_sigterm(), pytest.raises(Interrupted):
        tasks.asked_to_stop(cluster, done)
    assert len(done) < 5


@pytest.mark.faults
def test_an_item_that_kills_every_worker_is_given_up(cluster):
    with pytest.raises(UserError, match=r"workers died 4 times while processing item 3 .*fewer workers"):
        list(cluster.map_unordered(tasks.die_always, range(9)))
