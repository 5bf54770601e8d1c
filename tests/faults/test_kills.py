"""Kill -9 at random moments of a whole run, started again each time: it ends as if nothing had happened."""

import json
import random
import time

import pytest

STAGES = ["corpus", "base", "negatives", "energy", "candidates", "baselines", "evaluation"]
SHOWN_SECONDS = 3.0  # that a report may take, to be killed in


def kill_in(child, folder, stage, share, seconds):
    """Kill it when so large a share of a stage's time has passed since it began; whether it was still running.

    ``stage`` may be the report, which begins when all stages have ended.
    """
    began = folder / stage / "begun.json" if stage in STAGES else folder / STAGES[-1] / "stage.json"
    while not began.exists() and not child.ended():
        time.sleep(0.001)
    time.sleep(share * seconds)
    return child.kill()


def durations(folder):
    """Seconds of each stage of a finished run."""
    stages = {name: json.loads((folder / name / "stage.json").read_text())["seconds"] for name in STAGES}
    return stages | {"report": SHOWN_SECONDS}


def kill_often(begin, recipe, folder, moments, seconds):
    """How many of the kills hit a running command."""
    hits = 0
    for stage, share in moments:
        hits += kill_in(begin("run", recipe, "--out", folder), folder, stage, share, seconds[stage])
    status, _, err = begin("run", recipe, "--out", folder).wait()
    assert status == 0, err
    return hits


def test_three_kills(begin, recipes, whole, ends_as, tmp_path):
    moments = [("corpus", 0.5), ("negatives", 0.3), ("evaluation", 0.6)]
    assert kill_often(begin, recipes["counted"], tmp_path / "cut", moments, durations(whole("counted"))) == 3
    ends_as(tmp_path / "cut", "counted")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["counted", "trained"])
def test_twenty_kills_at_random_moments_of_every_stage(begin, recipes, whole, ends_as, tmp_path, name):
    """Three in each stage and in the report, at moments of it that a seed chooses."""
    rng = random.Random(f"kills of {name}")
    moments = [(stage, share) for stage in [*STAGES, "report"] for share in sorted(rng.random() for _ in range(3))]
    hits = kill_often(begin, recipes[name], tmp_path / "cut", moments, durations(whole(name)))
    assert hits >= 20  # of 24: one that comes late for the report finds nothing to kill
    ends_as(tmp_path / "cut", name)
