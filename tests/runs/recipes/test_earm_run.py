"""A run whose base is its own energy: trained with E-ARM, measured and used as any residual model."""

import json

import pytest
import torch

from freenergy import Continuations, Logits, UserError, load, load_recipe, run

EARM = """
[base.earm]
length = 4
start_epoch = 0
[base.scheduled]
most = 0.2
[negatives]
validation_windows = 8
validation_per_prefix = 7
[energy]
kind = "logits"
"""
CHANGES = [
    "base.optimisation.steps=8",
    "base.optimisation.validate_every=4",
    "base.optimisation.accumulate=1",
]


@pytest.fixture(scope="module")
def path(write_recipe, tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("earm"), EARM)


@pytest.fixture(scope="module")
def done(path, finished_run):
    folder, _, results = finished_run(path.read_text(), CHANGES)
    return folder, results


def test_the_base_is_the_energy(done):
    folder, results = done
    summary = {result.name: result.summary for result in results}
    assert summary["energy"]["parts"] == [{"kind": "logits"}]
    assert set(summary["negatives"]) == {"validation", "relative_to_another_law"}  # nothing is learned from training
    joint = summary["evaluation"]["joint"]
    assert joint["perplexity"]["certified"] > 1
    records = [json.loads(line) for line in (folder / "base/training/metrics.jsonl").read_text().splitlines()]
    assert all({"gain", "effective", "cross_entropy"} <= set(record["metrics"]) for record in records)


def test_everything_of_a_joint_model_works(done):
    joint = load(done[0])
    assert isinstance(joint.energy, Logits)
    x = Continuations.from_lists([[5, 6, 7]], [[[8, 9, 10, 11], [3, 4, 5, 6]]])
    logits = joint.base.model(torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 3, 4, 5]])).logits[:, -1]
    torch.testing.assert_close(joint.energy(x)[0].float(), -logits.logsumexp(-1), atol=1e-4, rtol=0)
    texts = joint.sample("The module", candidates=8, n=2, seed=3)
    assert len(texts.texts) == 2
    assert len(joint.score("The module", ["is", "was"]).candidates) == 2


@pytest.mark.faults
def test_killed_it_ends_with_the_same_bits(path, done, tmp_path, hashes, begin):
    """Kill −9 in the middle of E-ARM's steps; the averages of Z go on where they were."""
    folder = tmp_path / "run"
    changes = [word for change in CHANGES for word in ("--set", change)]
    command = ("run", path, "--out", folder, "--stage", "base", *changes)
    metrics = folder / "base/training/metrics.jsonl"
    begin(*command).kill_when(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3)
    begin(*command).succeed()
    name = "base/model/model.safetensors"
    assert hashes(folder)[name] == hashes(done[0])[name]


def test_a_memory_trains_and_resumes(path, tmp_path):
    changes = [*CHANGES, "base.memory=20"]
    for _ in run(load_recipe(str(path), changes), tmp_path / "run", stage="base"):
        pass
    records = (tmp_path / "run/base/training/metrics.jsonl").read_text().splitlines()
    assert len(records) == 8
    with pytest.raises(UserError, match="accumulate"):
        load_recipe(str(path), [*changes, "base.optimisation.accumulate=2"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("base.earm.length=0", "1 or more fake tokens"),
        ("base.earm.recent=5", "recent is 5"),
        ("base.earm.weights=2", "unknown key base.earm.weights"),
        ("base.scheduled.most=0", "most"),
        ("base.memory=-1", "memory"),
    ],
)
def test_senseless_settings_are_one_sentence(path, call, change, word):
    status, _, err = call("run", path, "--set", change)
    assert status == 2
    assert word in err
    assert "Traceback" not in err


def test_a_run_that_would_end_before_earm_begins_is_refused(path, tmp_path, call):
    arguments = [word for change in [*CHANGES, "base.earm.start_epoch=9"] for word in ("--set", change)]
    status, _, err = call("run", path, "--out", tmp_path / "run", "--stage", "base", *arguments)
    assert status == 2
    assert "E-ARM starts at epoch 9" in err
