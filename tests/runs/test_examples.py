"""The examples run as commands and show what they say."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name, *options):
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.statistical
def test_resampling_finds_right_sums():
    """n = 16 is better than n = 1 by more than two errors; seeded, so it fails always or never on one machine.

    Mutant: weights e^{+E}, which the same comparison refuses.
    """
    result = json.loads(example("sums.py", "--quick", "--json"))
    one, four, sixteen = result["rows"]
    assert [row["n"] for row in result["rows"]] == [1, 4, 16]
    assert one["right"] == one["ceiling"]
    assert abs(one["right"] - result["floor"]) <= 4 * one["error"]
    noticeable = 2 * math.hypot(one["error"], sixteen["error"])
    assert sixteen["right"] - one["right"] > noticeable
    assert sixteen["flipped"] - one["right"] < noticeable
    for row in (one, four, sixteen):
        assert row["right"] <= row["ceiling"]
        assert row["error"] == pytest.approx(math.sqrt(row["right"] * (1 - row["right"]) / result["problems"]))
