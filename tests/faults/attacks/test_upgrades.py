"""Upgrades keep work: runs of earlier landings are opened, evaluated and resumed; a patch release redoes nothing."""

import importlib.metadata
import json
import tarfile
from pathlib import Path

import pytest

from freenergy import UserError, load, load_recipe, run
from freenergy.core.checksums import verify
from freenergy.core.compatibility import FORMAT, check_format
from freenergy.runs.folder import BEGUN, begin, replaced

OLD = sorted(Path(__file__).with_name("old_runs").glob("*.tar.xz"))
SKIPPED = ("seconds", "cpu_seconds", "cost", "cached", "run", "report", "versions", "page")


@pytest.fixture(params=OLD, ids=lambda path: path.name.partition(".")[0])
def old(request, tmp_path, monkeypatch):
    """The run of an earlier landing, with its recipe, its text and what it answered then."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in SKIPPED}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/stage.json")}


def cached(folder):
    return {result.name: result.was_cached for result in run(load_recipe(str(folder / "recipe.toml")), folder / "run")}


def test_there_are_old_runs():
    assert OLD, "python old_runs/make.py makes one"


def test_an_old_run_is_opened_evaluated_and_not_redone(old, call):
    before = stamps(old / "run")
    done, measured = json.loads((old / "answers.json").read_text())
    status, out, err = call("evaluate", "run", "--windows", 2, "--candidates", 3, "--json")
    assert status == 0, err
    assert timeless(json.loads(out)) == timeless(measured)
    assert load("run").sample("the river", n=1, candidates=4)[0].text
    found = cached(old)
    assert set(found.values()) == {True}, found
    assert stamps(old / "run") == before
    status, out, err = call("run", "recipe.toml", "--out", "run", "--json")
    assert status == 0, err
    numbers = {name: timeless(each) for name, each in json.loads(out).items() if name in found}
    assert numbers == {name: timeless(done[name]) for name in numbers}
    assert not verify(old / "run").damaged


def test_an_old_run_is_resumed(old):
    """A stage that had not been finished is finished; the others stay as they are."""
    (old / "run" / "evaluation" / "stage.json").unlink()
    assert [name for name, was in cached(old).items() if not was] == ["evaluation"]


@pytest.mark.parametrize("version", ["0.1.1", "0.2.0"])
def test_a_patch_or_minor_release_redoes_nothing(old, call, monkeypatch, version):
    """D4: before, every stage was done again after a patch release, and its folder emptied first."""
    true = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "freenergy" else true(name))
    monkeypatch.setattr(
        "freenergy.runs.folder.package_version", lambda name: version if name == "freenergy" else true(name)
    )
    before = stamps(old / "run")
    assert set(cached(old).values()) == {True}
    assert call("evaluate", "run", "--windows", 2, "--candidates", 3)[0] == 0
    assert stamps(old / "run") == before


def test_a_change_of_a_stage_s_algorithm_redoes_it_and_what_reads_it(old):
    from dataclasses import replace

    from freenergy.runs.run import Step

    recipe = load_recipe("recipe.toml")
    stages = {stage.name: stage for stage in recipe.stages()}
    assert {stage.version for stage in stages.values()} == {1}
    from freenergy.runs.run import Plan

    plan = Plan({"a": 1}, lambda folder, progress: {})
    one = Step("energy", plan, old / "x", {})
    assert one.key != replace(one, version=2).key
    assert one.key == replace(one, version=1).key


def test_what_other_settings_have_left_is_kept_and_taken_back(old, call):
    """Nothing expensive is deleted for its replacement; the settings of before cost nothing."""
    energy = old / "run" / "energy" / "stage.json"
    content, base = energy.read_bytes(), stamps(old / "run")[old / "run" / "base" / "stage.json"]
    changed = ("run", "recipe.toml", "--out", "run", "--set", "training.l2=[0.25]", "--stage", "energy")
    status, _, err = call(*changed)
    assert status == 0, err
    assert "kept in" in " ".join(err.split())
    key = json.loads(content)["key"]
    assert (replaced(old / "run" / "energy", key) / "stage.json").read_bytes() == content
    assert energy.read_bytes() != content
    assert stamps(old / "run")[old / "run" / "base" / "stage.json"] == base
    assert cached(old)["energy"], "taken back, not trained again"
    assert energy.read_bytes() == content
    assert call("run", "recipe.toml", "--out", "run", "--discard-replaced")[0] == 0
    assert not (old / "run" / "replaced").exists()


def test_unfinished_work_of_other_settings_is_kept_too(tmp_path):
    folder = tmp_path / "negatives"
    assert begin(folder, "one") is False
    (folder / "shard").write_text("hours of draws")
    assert begin(folder, "two") is False
    assert [path.name for path in folder.iterdir()] == [BEGUN]
    (folder / "shard").write_text("others")
    assert begin(folder, "one") is True
    assert (folder / "shard").read_text() == "hours of draws"
    assert begin(folder, "two") is True
    assert (folder / "shard").read_text() == "others"


def test_a_link_in_place_of_a_stage_is_refused(tmp_path):
    victim = tmp_path / "victim"
    begin(victim, "one")
    (victim / "data").write_text("mine")
    (tmp_path / "base").symlink_to(victim)
    with pytest.raises(UserError, match="is a link"):
        begin(tmp_path / "base", "two")
    assert (victim / "data").read_text() == "mine"


def test_a_later_format_is_refused_in_one_sentence(old, call):
    check_format({}, old)
    check_format({"format": FORMAT}, old)
    from freenergy.core.files import fingerprint, read_json, write_json

    path = old / "run" / "base" / "stage.json"
    record = {key: value for key, value in read_json(path).items() if key != "mark"} | {"format": FORMAT + 1}
    write_json(path, record | {"mark": fingerprint(record)})
    status, _, err = call("run", "recipe.toml", "--out", "run")
    assert status == 2
    assert "install a newer freenergy" in err


def test_a_damaged_record_is_refused_and_nothing_is_deleted(old, call):
    """Before, a turned bit in stage.json had the stage emptied and done again."""
    path = old / "run" / "negatives" / "stage.json"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 1'))
    status, _, err = call("run", "recipe.toml", "--out", "run")
    assert status == 2
    assert "is damaged" in err
    assert list((old / "run" / "negatives").rglob("*.parquet"))
