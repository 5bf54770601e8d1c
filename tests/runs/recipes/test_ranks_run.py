"""A whole run under torchrun and on one rank: the same numbers, and one goes on where the other was killed."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from freenergy.core.files import read_json

BIT = """
[negatives]
per_prefix = 4
windows = 24
validation_windows = 16
validation_per_prefix = 7
[energy]
kind = "bit"
[training]
negatives = 2
[training.optimisation]
steps = 12
batch_size = 4
accumulate = 2
learning_rate = 1e-3
warmup = 2
validate_every = 4
checkpoint_seconds = 0.0
"""
CHANGES = ["evaluation.candidates=8", "evaluation.certified_windows=6", "base.optimisation.steps=12"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
pytestmark = pytest.mark.faults


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
ACCELERATE = ["accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "accelerate": [*ACCELERATE, "--cpu", "-m"],
    "FSDP": [*ACCELERATE, "--use_fsdp", "--fsdp_version", "2", "-m"],
}


@pytest.fixture
def started(recipe):
    """Start the recipe in a folder, on one rank or two."""
    recipe.write_text(recipe.read_text() + BIT)

    def started(out, ranks, launcher="torchrun"):
        launched = LAUNCHERS[launcher] if ranks > 1 else []
        changes = [word for change in CHANGES for word in ("--set", change)]
        command = [sys.executable, "-m", *launched, "freenergy", "run", str(recipe), "--out", str(out), *changes]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return started


def numbers(folder):
    """The certified gain with its interval, and the perplexity of the base."""
    found = read_json(folder / "evaluation" / "evaluation.json")
    return found["joint"]["gain"], found["base"]["perplexity"]["token"]


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-2000:]
    return out


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_find_what_one_finds(started, tmp_path, launcher):
    finish(started(tmp_path / "one", 1))
    out = finish(started(tmp_path / "two", 2, launcher))
    assert out.count("The run is in") == 1  # one rank speaks
    (gain, base), (same_gain, same_base) = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert same_base == pytest.approx(base, rel=1e-4)
    low, high = gain["nats_interval"]
    assert abs(same_gain["nats_per_sequence"] - gain["nats_per_sequence"]) < (high - low) / 4


def begun(started, out, ranks):
    """A run in the middle of training its base, and the records of its steps."""
    process, records = started(out, ranks), out / "base" / "training" / "metrics.jsonl"
    while not records.is_file() or len(records.read_text().splitlines()) < 5:
        assert process.poll() is None, process.stderr.read()[-2000:]
    return process, records


def test_sigterm_to_torchrun_keeps_the_step_in_hand(started, tmp_path):
    process, records = begun(started, tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)  # torchrun hands it on; its own status tells of the signal
    _, err = process.communicate(timeout=120)
    assert err.count("freenergy: stopped on request") == 1
    assert (tmp_path / "run" / "base" / "training" / "checkpoint.safetensors").is_file()
    kept = len(records.read_text().splitlines())
    assert 5 <= kept < 12
    finish(started(tmp_path / "run", 2))
    finish(started(tmp_path / "straight", 2))
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_killed_training_goes_on_on_another_number_of_ranks(started, tmp_path, before, after):
    out = tmp_path / "run"
    process, records = begun(started, out, before)
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        child.send_signal(signal.SIGKILL)
    process.communicate()
    finish(started(out, after))
    finish(started(tmp_path / "straight", after))
    assert len(records.read_text().splitlines()) == 12
    (gain, base), (straight_gain, straight_base) = numbers(out), numbers(tmp_path / "straight")
    assert base == pytest.approx(straight_base, rel=1e-4)
    low, high = straight_gain["nats_interval"]
    assert abs(gain["nats_per_sequence"] - straight_gain["nats_per_sequence"]) < (high - low) / 4
