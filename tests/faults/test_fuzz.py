"""Mutated recipes, JSON lines and checkpoints through the command line: no traceback, no hang, no bomb of memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzzing.py")


@pytest.fixture(scope="session")
def world(recipes, small_text, tmp_path_factory):
    """What the script begins with: a text and two recipes for it."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copy(small_text, folder / "few.jsonl")
    for name, path in recipes.items():
        (folder / f"{name}.toml").write_text(path.read_text().replace(str(small_text), "few.jsonl"))
    return folder


def check(world, first, count):
    command = [sys.executable, str(SCRIPT), str(world), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["wrong"] == []  # each with its seed: python fuzzing.py WORLD SEED 1 does it again
    assert sum(found["counts"].values()) == count
    return found["counts"]


def test_a_hundred_inputs(world):
    counts = check(world, 0, 100)
    kinds = {"recipe", "set", "experiment", "text", "lists", "prefixes", "run"}
    assert {name.split()[0] for name in counts} == kinds
    assert {name.split()[1] for name in counts} == {"0", "2"}  # some mutations do no harm


@pytest.mark.faults
@pytest.mark.parametrize("thousand", range(1, 11))
def test_ten_thousand_inputs(world, thousand):
    check(world, 1000 * thousand, 1000)
