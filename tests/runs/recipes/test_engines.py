"""Which engine made the shards of a run, and who was killed meanwhile, does not change a bit of it."""

import time
from contextlib import contextmanager

import psutil
import pytest

from freenergy import load_recipe, run
from freenergy.core.workers.local import ProcessPool
from freenergy.core.workers.pool import worker_pool
from freenergy.recipes.stages.evaluation import EvaluationRequest, evaluate

CHANGES = ["evaluation.candidates=8", "evaluation.certified_windows=24", "evaluation.position_windows=2",
           "evaluation.position_draws=4", "evaluation.windows=100", "negatives.shard=2",
           "training.lengths=2"]  # fmt: skip
TEXT = EvaluationRequest(split="validation", windows=9, candidates=5)


@pytest.fixture(scope="module")
def made(joint_run, tmp_path_factory, contents):
    """What this process alone makes of the recipe, and the recipe."""
    recipe, folder = load_recipe(str(joint_run[1]), CHANGES), tmp_path_factory.mktemp("here") / "run"
    list(run(recipe, folder))
    evaluate(folder, TEXT)
    return contents(folder), recipe


@pytest.fixture(scope="module")
def contents(hashes):
    """Hashes of all that a run has made, but for the time that baselines took; nothing half-written may be left."""

    def contents(folder):
        assert [path for path in folder.rglob(".*") if path.name.endswith(".part")] == []
        found = hashes(folder)
        return {name: mark for name, mark in found.items() if not name.startswith("baselines/")}

    return contents


class Watcher:
    """Progress that does something when a bar of workers has come to a number of shards."""

    def __init__(self, **moments):
        self.moments, self.seen = moments, []

    @contextmanager
    def track(self, label, total=None, unit=""):
        count = 0

        def advance(amount, note=""):
            nonlocal count
            count += 1
            for name, (words, number, act) in self.moments.items():
                if unit == "shards" and words in label and count == number and name not in self.seen:
                    self.seen.append(name)
                    act()

        yield advance

    def say(self, message):
        pass


def kill(find):
    """Kill -9 the first process that is found, as soon as there is one."""
    deadline = time.monotonic() + 60
    while not (found := find()):
        assert time.monotonic() < deadline, "there is nobody to kill"
        time.sleep(0.001)
    found[0].kill()


def wait_until(is_so):
    """What is left of a run may end before a lost machine is found out."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def children():
    """Workers of a pool in this process."""
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.faults
def test_a_pool_whose_workers_are_killed_makes_the_same_run(made, contents, tmp_path):
    expected, recipe = made
    watcher = Watcher(
        drawing=("draws for train", 3, lambda: kill(children)), scoring=("scores of", 2, lambda: kill(children))
    )
    with ProcessPool(2) as pool:
        list(run(recipe, tmp_path / "run", workers=pool, progress=watcher))
        evaluate(tmp_path / "run", TEXT, workers=pool)
        assert pool.cpu_seconds > 0
    assert watcher.seen == ["drawing", "scoring"]
    assert contents(tmp_path / "run") == expected
    assert children() == []


@pytest.fixture
def cluster():
    """Two machines with a core each, and one that only keeps the books; none is there afterwards."""
    pytest.importorskip("freenergy.core.workers.ray")
    from ray.cluster_utils import Cluster

    # lost machines are found out in seconds, not in a minute
    watch = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 500}
    room = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": watch, **room})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **room)
        yield cluster
    finally:
        cluster.shutdown()


def of_node(node):
    """Ray's workers on one of its machines that are at work."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [child for child in raylet.children(recursive=True) if "ray::_work" in " ".join(child.cmdline())]


def lose(cluster):
    """One of the machines is gone."""
    cluster.remove_node(cluster.worker_nodes and next(iter(cluster.worker_nodes)), allow_graceful=False)


def busy(cluster):
    return [process for node in cluster.worker_nodes for process in of_node(node)]


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore")  # of ray's own
@pytest.mark.parametrize("words", ["draws for train", "draws for test", "scores of"])
def test_a_cluster_that_loses_a_worker_and_a_machine_makes_the_same_run(made, contents, cluster, tmp_path, words):
    expected, recipe = made
    watcher = Watcher(worker=(words, 1, lambda: kill(lambda: busy(cluster))), machine=(words, 3, lambda: lose(cluster)))
    with worker_pool(f"ray:{cluster.address}") as engine:
        assert engine.size == 2
        list(run(recipe, tmp_path / "run", workers=engine, progress=watcher))
        wait_until(lambda: engine.size == 1)
        evaluate(tmp_path / "run", TEXT, workers=engine)
    assert watcher.seen == ["worker", "machine"]
    assert contents(tmp_path / "run") == expected


@pytest.mark.faults
def test_no_workers_outlive_a_process_that_was_killed(joint_run, tmp_path, begin):
    """They would go on writing in a folder that the next process believes to be its own."""
    changes = [word for change in CHANGES for word in ("--set", change)]
    before = {process.pid for process in psutil.process_iter()}
    child = begin("run", joint_run[1], "--out", tmp_path / "run", *changes, "--workers", "local:2")
    child.kill_when(lambda: len(list(tmp_path.rglob("negatives/train/*.parquet"))) > 2)
    psutil.wait_procs([p for p in psutil.process_iter() if p.pid not in before and _is_worker(p)], timeout=30)
    assert [p for p in psutil.process_iter() if p.pid not in before and _is_worker(p)] == []


def _is_worker(process):
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False
