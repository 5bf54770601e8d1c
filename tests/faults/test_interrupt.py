"""SIGTERM is a request: the unit in hand is finished, all is kept, the status is 0, and the same command goes on."""

import json
import os
import signal
import time

import pytest

from freenergy.core import progress as interrupt

from .test_kills import STAGES

WORDS = "freenergy: stopped on request; run the same command again to resume"


def stop_in(begin, command, folder, stage):
    """Start it, and ask it to stop as soon as it is at work and a stage has begun."""
    recipe, begun = folder / "recipe.json", folder / stage / "begun.json"
    before = recipe.stat().st_mtime_ns if recipe.exists() else None
    child = begin(*command)
    while not (begun.exists() and recipe.stat().st_mtime_ns != before) and not child.ended():
        time.sleep(0.001)
    child.send(signal.SIGTERM)
    return child.wait()


def stop_often(begin, recipe, folder, stages, *more):
    """Interrupted in these stages, then left alone; how often the word was said."""
    words = 0
    for stage in stages:
        status, out, err = stop_in(begin, ("run", recipe, "--out", folder, *more), folder, stage)
        assert status == 0, err
        assert "Traceback" not in err
        words += err.strip().endswith(WORDS)
        if "--json" in more and err.strip().endswith(WORDS):
            assert json.loads(out) == {"stopped": True}
        assert not list(folder.rglob("*.part"))
    status, _, err = begin("run", recipe, "--out", folder).wait()
    assert status == 0, err
    assert WORDS not in err
    return words


def test_stopped_twice(begin, recipes, whole, ends_as, tmp_path):
    whole("counted")
    assert stop_often(begin, recipes["counted"], tmp_path / "cut", ["corpus", "evaluation"], "--json") == 2
    ends_as(tmp_path / "cut", "counted")


@pytest.mark.faults
def test_stopped_in_every_stage(begin, recipes, whole, ends_as, tmp_path):
    """Twice in each; a stop that comes after the last unit of the last stage may come too late."""
    whole("trained")
    stages = [stage for stage in STAGES for _ in range(2)]
    assert stop_often(begin, recipes["trained"], tmp_path / "cut", stages) >= len(stages) - 2
    ends_as(tmp_path / "cut", "trained")


def test_a_request_is_heard_between_units_only():
    before = signal.getsignal(signal.SIGTERM)
    with interrupt.handle_sigterm():
        assert not interrupt.stop_requested()
        interrupt.raise_if_stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.stop_requested()
        with pytest.raises(interrupt.Interrupted):
            interrupt.raise_if_stop_requested()
    assert not interrupt.stop_requested()
    assert signal.getsignal(signal.SIGTERM) is before
