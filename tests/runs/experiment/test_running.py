"""The engine: killed anywhere it ends with the same bits, nothing is done twice, controls have equal compute."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import ttest_rel

from freenergy import EARM, UserError
from freenergy.core.checksums import verify
from freenergy.core.errors import DivergenceError
from freenergy.core.rng import Rng
from freenergy.recipes import load_run
from freenergy.recipes.families import network
from freenergy.runs.run import run as run_recipe
from freenergy.runs.sweep.run import run_sweep
from freenergy.training.loop import read_records

sys.path.insert(0, str(Path(__file__).parent))
import world
from world import CONTROL_STEPS, Killed, Life, World, contents, experiment, run

sys.path.pop(0)


@pytest.fixture
def fixed_control(monkeypatch):
    """A clock that always says the same."""
    monkeypatch.setattr(network, "steps_for", lambda spent, one: CONTROL_STEPS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "steps_for", lambda spent, one: CONTROL_STEPS)
        return folder, run(folder)


@pytest.fixture
def whole_run(fixed_control, finished, tmp_path):
    """A finished experiment of one's own."""
    folder, table = finished
    shutil.copytree(folder, tmp_path / "whole")
    return tmp_path / "whole", table


def test_rows_of_the_table(whole_run):
    folder, table = whole_run
    assert [row["name"] for row in table["rows"]] == ["base", "smooth", "E-ARM", "E-ARM, control"]
    assert [row["kind"] for row in table["rows"]] == ["base", "row", "row", "control"]
    assert [row["steps"] for row in table["rows"]] == [[8, 8], [6, 6], [6, 6], [CONTROL_STEPS] * 2]
    assert [row["control"] for row in table["rows"]] == [None, None, "E-ARM, control", None]
    assert table["columns"] == ["nats", "a thing without bounds"]
    for row in table["rows"]:
        for seed, where in enumerate(row["folders"]):
            this = load_run(folder / where)
            assert this.recipe.seed == seed
            assert row["numbers"]["nats"]["seeds"][seed] == dict(this.recipe.numbers(this))["nats"]
            assert row["cpu_seconds"]["seeds"][seed] == pytest.approx(sum(cpu(folder / where)))
        assert row["numbers"]["a thing without bounds"] == {"seeds": [None] * 2, "mean": None, "interval": [None] * 2}
    assert json.loads((folder / "table.json").read_text()) == table


def test_rows_go_on_from_the_base_and_not_from_fresh_weights(fixed_control, tmp_path):
    """With a learning rate of nothing a row ends with the base's weights; from scratch it does not."""
    steps = {"steps": 2, "batch_size": 4, "validate_every": 1, "learning_rate": 1e-12, "weight_decay": 0.0}
    rows = [{"name": "on"}, {"name": "anew", "scratch": True}]
    run(tmp_path, experiment(seeds=[0], rows=rows, continued={"base": {"optimisation": steps}}))
    base, on, anew = (
        load_file(tmp_path / "seed-0" / name / "base" / "weights.safetensors")["weight"]
        for name in ("base", "on", "anew")
    )
    assert torch.allclose(base, on, atol=1e-9)
    assert torch.equal(base, anew), "the same teaching from scratch is the base once more"
    fresh = world.Bigram(Rng(0).child("experiment").child("weights")).module.weight
    assert not torch.allclose(base, fresh, atol=1e-3)


def test_intervals_and_differences_are_those_of_scipy(fixed_control, tmp_path):
    table = run(tmp_path, experiment(seeds=[0, 1, 2]))
    numbers = {row["name"]: row["numbers"]["nats"] for row in table["rows"]}
    ours, other = (np.array(numbers[name]["seeds"]) for name in ("E-ARM", "E-ARM, control"))
    assert numbers["E-ARM"]["mean"] == pytest.approx(ours.mean())
    (found,) = [each for each in table["comparisons"] if (each["ours"], each["other"]) == ("E-ARM", "E-ARM, control")]
    assert found["is_control"]
    interval = ttest_rel(ours, other).confidence_interval(0.95)
    expected = [(ours - other).mean(), interval.low, interval.high]
    assert dict(map(tuple, found["over_seeds"]))["nats"] == pytest.approx(expected)
    assert dict(map(tuple, found["on_test"]))["nats"][0] == pytest.approx(expected[0])
    against_base = [each["ours"] for each in table["comparisons"] if each["other"] == "base"]
    assert against_base == ["smooth", "E-ARM", "E-ARM, control"]


def test_killed_anywhere_it_ends_with_the_same_bits(whole_run, tmp_path):
    """Lives of every length, from one that ends after five batches to one that ends while the last row is measured."""
    folder, _ = whole_run
    expected = contents(folder)
    for events in (5, 11):
        again = tmp_path / f"lives of {events}"
        for _ in range(100):
            try:
                run(again, world=World(Life(events)))
                break
            except Killed:
                (again / "seed-0" / ".left.123.part").mkdir(exist_ok=True)  # what a killed process may leave
        assert contents(again) == expected


def test_kill_9(tmp_path, kill_at):
    command = [sys.executable, str(Path(__file__).with_name("world.py"))]
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    killed, seed = tmp_path / "killed", tmp_path / "killed" / "seed-0"
    for moment in ("base/base/training/checkpoint.safetensors", "e-arm/base/training/checkpoint.safetensors"):
        kill_at([*command, str(killed)], seed / moment)
    assert not (killed / "table.json").exists()
    subprocess.run([*command, str(killed)], check=True)
    assert contents(killed) == contents(tmp_path / "whole")


@pytest.fixture
def kill_at():
    def kill_at(command, path):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            while not path.exists():
                assert process.poll() is None, process.stderr.read().decode()[-500:]
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()

    return kill_at


def test_what_is_done_is_not_done_again(whole_run):
    folder, table = whole_run
    idle = World(Life(0))
    assert run(folder, world=idle) == table
    assert idle.compared == 0


def test_a_row_is_a_run(whole_run):
    """It is verified and run again by itself, in its place in the sweep."""
    folder, table = whole_run
    world.ChainRecipe.world = World()
    row = folder / table["rows"][2]["folders"][1]
    assert verify(row).damaged == ()
    this = load_run(row)
    assert [result.was_cached for result in run_recipe(this.recipe, row)] == [True, True]
    weights = row / "base" / "weights.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(row / "base")
    list(run_recipe(this.recipe, row))
    assert weights.read_bytes() == before, "it begins with the weights of the first row"
    shutil.rmtree(folder / table["rows"][0]["folders"][1] / "base")
    shutil.rmtree(row / "base")
    with pytest.raises(UserError, match=r"the stage base of .*seed-1/base is not finished"):
        list(run_recipe(this.recipe, row))


def test_changes_redo_what_depends_on_them(whole_run):
    folder, _ = whole_run
    done = {name: folder / "seed-0" / name / "base" / "stage.json" for name in ("base", "smooth", "e-arm")}
    before = {name: path.stat().st_mtime_ns for name, path in done.items()}
    rows = world.recipe()["rows"]
    rows[0]["set"]["base"]["label_smoothing"] = 0.2
    run(folder, experiment(rows=rows))
    after = {name: path.stat().st_mtime_ns for name, path in done.items()}
    assert [name for name in done if after[name] > before[name]] == ["smooth"]
    with pytest.raises(Killed):
        run(folder, world=World(Life(0), fingerprint="other data"))


def test_what_only_measuring_reads_trains_nothing(whole_run):
    folder, _ = whole_run
    row = folder / "seed-0" / "e-arm"
    trained, measured = row / "base" / "stage.json", row / "measurement" / "stage.json"
    before = trained.stat().st_mtime_ns, measured.stat().st_mtime_ns
    run(folder, experiment(set={"chain": {"candidates": 99}}))
    assert trained.stat().st_mtime_ns == before[0]
    assert measured.stat().st_mtime_ns > before[1]


def test_a_control_costs_what_its_row_costs(tmp_path):
    """From the records: CPU seconds of the row's steps over the median of a plain step of the same seed."""
    run(tmp_path)
    for seed in (tmp_path / "seed-0", tmp_path / "seed-1"):
        spent = sum(cpu(seed / "e-arm"))
        one = float(np.median(cpu(seed / "base")))
        stored = json.loads((seed / "e-arm-control" / "control.json").read_text())
        del stored["key"]
        assert stored == {"steps": max(1, round(spent / one)), "cpu_seconds": pytest.approx(spent),
                          "step_seconds": pytest.approx(one), "step_of": "base"}  # fmt: skip
        assert len(cpu(seed / "e-arm-control")) == stored["steps"]


def records(folder, key):
    return [record[key] for record in read_records(folder / "base" / "training")]


def cpu(folder):
    return records(folder, "cpu_seconds")


def test_a_control_with_scheduled_sampling_is_timed_by_such_a_row(fixed_control, tmp_path):
    twice = {"scheduled": {"most": 0.5}}
    rows = [
        {"name": "scheduled", "set": {"base": twice}},
        {"name": "both", "control": True, "set": {"base": {**twice, "earm": {"length": 4, "start_epoch": 0}}}},
    ]
    run(tmp_path, experiment(seeds=[0], rows=rows))
    control = tmp_path / "seed-0" / "both-control"
    assert json.loads((control / "control.json").read_text())["step_of"] == "scheduled"


def test_a_control_s_steps_are_decided_once(whole_run):
    folder, _ = whole_run
    control = folder / "seed-0" / "e-arm-control"
    stored = json.loads((control / "control.json").read_text())
    (control / "control.json").write_text(json.dumps(stored | {"steps": 5}))
    table = run(folder)
    assert table["rows"][-1]["steps"] == [5, CONTROL_STEPS]
    rates = records(control, "learning_rate")
    assert rates[-1] == pytest.approx(0.02 * 0.1), "the schedule is stretched to its own steps"


def test_rows_of_one_seed_see_the_same_batches(fixed_control, tmp_path):
    """A row with nothing added and one with E-ARM's tiny weight begin with the same cross-entropy."""
    rows = [
        {"name": "plain"},
        {"name": "E-ARM", "set": {"base": {"earm": {"length": 4, "start_epoch": 0, "weight": 1e-9}}}},
    ]
    run(tmp_path, experiment(seeds=[0], rows=rows))
    plain, earm = records(tmp_path / "seed-0" / "plain", "loss"), records(tmp_path / "seed-0" / "e-arm", "metrics")
    assert plain == pytest.approx([found["cross_entropy"] for found in earm], rel=1e-6)


def grid(epochs, weights=(), **more):
    vary = (
        {"base.earm.start_epoch": epochs, "base.earm.weight": weights} if weights else {"base.earm.start_epoch": epochs}
    )
    usual = {"base": {"earm": {"length": 4, "start_epoch": 1, "weight": 1.0}}}
    return experiment(seeds=[0], rows=[], grid={"vary": vary, "set": usual, **more})


def test_a_grid_has_a_row_for_each_point_and_one_control(fixed_control, tmp_path):
    table = run(tmp_path, grid([0, 1], [0.5, 1.0]))
    points = [row for row in table["rows"] if row["kind"] == "grid"]
    assert [(row["point"]["start_epoch"], row["point"]["weight"]) for row in points] == [
        (0, 0.5),
        (0, 1),
        (1, 0.5),
        (1, 1),
    ]
    assert points[0]["name"] == "E-ARM, start epoch 0, weight 0.5"
    assert {row["control"] for row in points} == {"grid, control"}
    (rows,) = grid([0, 1], [0.5, 1.0], full=False).variants.values()
    assert [tuple(row.point.values()) for row in rows if row.point] == [(0, 1), (1, 1), (1, 0.5)]


def test_the_control_of_a_grid_costs_what_the_most_expensive_point_costs(tmp_path):
    run(tmp_path, grid([0, 1]))
    seed = tmp_path / "seed-0"
    spent = [sum(cpu(path)) for path in sorted(seed.glob("e-arm-*"))]
    assert len(spent) == 2
    stored = json.loads((seed / "grid-control" / "control.json").read_text())
    assert stored["cpu_seconds"] == pytest.approx(max(spent))


def test_until_e_arm_begins_a_row_from_scratch_is_the_base(fixed_control, tmp_path):
    run(tmp_path, grid([1], control=False))
    point = next((tmp_path / "seed-0").glob("e-arm-*"))
    base, point = (records(path, "loss") for path in (tmp_path / "seed-0" / "base", point))
    assert base[:4] == point[:4]
    assert base[4:] != point[4:]


def test_variants_are_done_side_by_side(fixed_control, tmp_path):
    made = experiment(
        seeds=[0],
        rows=[{"name": "plain"}],
        variants={"small": {"chain": {"block": 8}}, "big": {"chain": {"block": 16}}},
    )
    assert [rows[1].recipe.chain.block for rows in made.variants.values()] == [8, 16]
    table = run(tmp_path, made)
    assert [row["name"] for row in table["rows"]] == ["small: base", "small: plain", "big: base", "big: plain"]
    assert [each["other"] for each in table["comparisons"]] == ["small: base", "big: base"]
    assert (tmp_path / "small" / "seed-0" / "plain" / "measurement" / "stage.json").is_file()


def test_only_one_process_works_in_a_folder(tmp_path):
    class Again(World):
        def network(self, rng):
            return run_sweep(experiment(), tmp_path)

    with pytest.raises(UserError, match="another process is running in"):
        run(tmp_path, world=Again())


def test_files_of_others_are_left_alone(tmp_path):
    precious = tmp_path / "seed-0" / "smooth" / "base" / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(UserError, match="holds files that no run has made"):
        run(tmp_path)
    assert precious.read_text() == "years of work"


def test_e_arm_that_never_begins_is_refused_before_anything_is_trained(tmp_path):
    rows = [{"name": "late", "set": {"base": {"earm": {"length": 4, "start_epoch": 3}}}}]
    with pytest.raises(UserError, match=r"E-ARM starts at epoch 3, but training ends after 1\.50 epochs"):
        run(tmp_path, experiment(rows=rows))
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_row_that_diverges_is_told_and_the_others_go_on(fixed_control, tmp_path, monkeypatch):
    def diverge(self, data, fakes, log_z):
        raise DivergenceError("the negative phase diverged at step 1")

    monkeypatch.setattr(EARM, "__call__", diverge)
    table = run(tmp_path)
    assert run(tmp_path, world=World(Life(0))) == table, "it is not tried again"
    told = {row["name"]: row["diverged"] for row in table["rows"]}
    assert told == {
        "base": None, "smooth": None, "E-ARM": "the negative phase diverged at step 1", "E-ARM, control": None
    }  # fmt: skip
    assert [(each["ours"], each["other"]) for each in table["comparisons"]] == [
        ("smooth", "base"),
        ("E-ARM, control", "base"),
    ]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.count("diverged") for line in lines if line.startswith("| E-ARM |")] == [2]
