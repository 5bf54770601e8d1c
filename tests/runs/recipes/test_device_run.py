"""A run says where it computed, does not depend on how that was asked for, and refuses a device that is not here."""

import json

import pytest
import torch

from freenergy import load, load_recipe, run
from freenergy.core.errors import UserError
from freenergy.testing.runs import tiny_run

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so cuda is not refused")


def record(folder, stage):
    return json.loads((folder / stage / "stage.json").read_text())


def test_the_device_is_recorded_and_is_no_part_of_the_keys(finished_run, corpus_file, tmp_path, hashes):
    text = tiny_run(corpus_file, base="counts", energy="ngram")
    folder, path, _ = finished_run(text)
    assert record(folder, "energy")["device"] in ("cpu", "cuda", "mps")
    results = list(run(load_recipe(str(path), ["device=cpu"]), folder))
    assert results
    assert all(result.was_cached for result in results)
    list(run(load_recipe(str(path), ["device=cpu"]), tmp_path / "again"))
    assert record(tmp_path / "again", "energy")["device"] == "cpu"
    again, before = hashes(tmp_path / "again"), hashes(folder)
    assert again.pop("recipe.json", None) is not None
    before.pop("recipe.json")
    if not torch.cuda.is_available():
        assert again == before


@needs_no_gpu
@pytest.mark.parametrize("how", [("--device", "cuda"), ("--set", "device=cuda")])
def test_cuda_on_a_machine_without_is_one_sentence_and_nothing_is_written(call, recipe, tmp_path, how):
    status, out, err = call("run", recipe, "--out", tmp_path / "run", *how)
    assert status == 2
    assert len(err.strip().splitlines()) <= 2  # the terminal may be narrow
    assert "device is cuda" in err
    assert "take --device cpu" in " ".join(err.split())
    assert "Traceback" not in out + err
    assert not (tmp_path / "run").exists()


@needs_no_gpu
def test_the_chosen_device_beats_the_recipe_in_every_command(call, joint_run, monkeypatch):
    folder, _ = joint_run
    monkeypatch.setenv("FREENERGY_DEVICE", "cuda")
    assert call("sample", folder, "--prefix", "import", "--num", 1, "--candidates", 4, "--device", "cpu")[0] == 0
    commands = [
        ("sample", folder, "--prefix", "import"),
        ("next", folder, "--prefix", "import"),
        ("score", folder, folder / "recipe.json"),
        ("evaluate", folder, "--split", "test"),
        ("serve", folder),
        ("distil", folder, "--out", folder / "student"),
    ]
    for command in commands:
        status, _, err = call(*command, "--device", "cuda:3")
        assert status == 2, command
        assert "device is cuda:3" in err, command


def test_load_takes_a_device(joint_run):
    folder, _ = joint_run
    model = load(folder, device="cpu")
    assert {weight.device.type for weight in model.energy.parameters()} <= {"cpu"}
    with pytest.raises(UserError, match="take auto, cpu, cuda"):
        load(folder, device="gpu")


def test_a_recipe_with_a_bad_device_is_refused(recipe):
    with pytest.raises(UserError, match="device is 'gpu': take auto"):
        load_recipe(str(recipe), ["device=gpu"])
