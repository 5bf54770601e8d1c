"""Two ranks with gloo against one: the same losses, checkpoints that go from one to the other; mutants that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freenergy import UserError
from freenergy.training.distributed.ranks import Ranks, speaks

WORKER = Path(__file__).with_name("ranks_worker.py")
CLOSE = 1e-5
TASKS = ["text", "earm", "bit"]


def test_micro_batches_are_shared_without_overlap():
    for count in (1, 2, 3, 4, 6, 12):
        shares = [list(Ranks(rank, count).share(12)) for rank in range(count)]
        assert sorted(micro for share in shares for micro in share) == list(range(12))
        assert {len(share) for share in shares} == {12 // count}


def test_a_step_that_cannot_be_shared_is_one_sentence():
    with pytest.raises(UserError, match="a step of 3 micro-batches cannot be shared by 2 ranks: set base"):
        Ranks(1, 2).share(3, "base.optimisation")


def test_alone_there_is_nobody_to_ask(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.found()
    assert ranks == Ranks(0, 1)
    assert ranks.is_first
    assert speaks()
    assert ranks.any(True, False) == [True, False]
    assert torch.equal(ranks.micros(torch.arange(6).view(3, 2)), torch.arange(6).view(3, 2))
    with ranks.first_rank_first():
        ranks.barrier()
    with pytest.raises(RuntimeError, match="closed by peer"), ranks.together():
        raise RuntimeError("closed by peer")  # of a rank alone this is an error like any other


def test_a_lost_peer_ends_a_rank_without_a_word():
    with pytest.raises(SystemExit) as ended, Ranks(1, 2).together():
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242")
    assert ended.value.code == 1


def on_two_ranks(folder, *more):
    """What both saw."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ended = subprocess.run(
        [*launcher, WORKER, folder, *more], env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What both ranks saw of everything."""
    return on_two_ranks(tmp_path_factory.mktemp("ranks"))


def furthest(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def test_two_ranks_are_one_for_a_few_steps(tmp_path):
    """The short form of what follows."""
    for rank in on_two_ranks(tmp_path, "short"):
        assert furthest(rank["two"], rank["one"][:12]) < CLOSE
        assert furthest(rank["two then one"], rank["one"]) < CLOSE


@pytest.mark.faults
@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_are_one(told, task):
    for rank in told:
        assert len(rank[task]["one"]) == 50
        assert furthest(rank[task]["one"], rank[task]["two"]) < CLOSE
        assert rank[task]["ranks agree"]
        assert rank[task]["weights"] < 1e-3
    assert told[0][task]["two"] == told[1][task]["two"]
    assert told[0][task]["one"][0] - min(told[0][task]["one"]) > 0.02  # something was learned


@pytest.mark.faults
@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_goes_from_any_way_to_any_other(told, task):
    relays = {name: losses for name, losses in told[0][task].items() if " then " in name}
    assert {"two then one", "one then sharded"} <= set(relays)
    for losses in relays.values():
        assert furthest(losses, told[0][task]["one"][: len(losses)]) < CLOSE


@pytest.mark.faults
@pytest.mark.parametrize("mutant", ["gradients stay", "dropout by rank"])
def test_mutants_are_noticed(told, mutant):
    losses = told[0]["mutants"][mutant]
    assert furthest(losses, told[0]["text"]["one"][: len(losses)]) > 100 * CLOSE


@pytest.mark.faults
def test_a_rank_that_is_asked_to_stop_stops_all_after_the_same_step(told):
    for rank in told:
        assert rank["stopped"]["after"] == 7
        assert furthest(rank["stopped"]["rest"], told[0]["text"]["one"][7:]) < CLOSE


@pytest.mark.faults
def test_a_module_that_was_sharded_is_plain_again(told):
    for rank in told:
        assert rank["sharded"]["is plain"]
        assert rank["sharded"]["weights"] < 1e-5
