"""The figures of an experiment are true to its records."""

import json

import matplotlib.image
import numpy as np
import pytest
from safetensors.numpy import save_file

from freenergy.report.experiment_figures import curves, draw_experiment, losses, study
from freenergy.runs.sweep.table import summed

EPOCH = 4


def write(folder, losses, validations, metrics=None):
    """Records of a training; a validation every second step."""
    (folder / "base" / "training").mkdir(parents=True)
    records = [
        {"step": step, "loss": loss, "metrics": metrics or {}, "validation": validations[step // 2 - 1] if step % 2 == 0
         else None}
        for step, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    (folder / "base" / "training" / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )


def row(name, kind, folders, **more):
    found = {"name": name, "variant": "", "kind": kind, "control": None, "numbers": {"perplexity": summed([9.0, 10.0])}}
    found |= {"epoch_steps": EPOCH, "epochs": [1.0, 1.0], "scratch": kind == "base", "folders": folders}
    return found | {"validation": summed([1.0, 2.0]), "point": {}} | more


@pytest.fixture
def rows(tmp_path):
    for seed in (0, 1):
        write(tmp_path / f"seed-{seed}" / "base", [4.0 + seed, 3.0, 2.0, 1.0], [2.5, 1.5 + seed])
        write(tmp_path / f"seed-{seed}" / "e-arm", [9.0, 9.0], [1.25], {"cross_entropy": 1.5})
        write(tmp_path / f"seed-{seed}" / "control", [1.0] * (2 + 2 * seed), [1.0, 0.75])
    names = {name: [f"seed-{seed}/{name}" for seed in (0, 1)] for name in ("base", "e-arm", "control")}
    return [
        row("base", "base", names["base"]),
        row("E-ARM", "row", names["e-arm"], control="E-ARM, control"),
        row("E-ARM, control", "control", names["control"]),
    ]


def test_curves_are_means_over_seeds(tmp_path, rows):
    training, validation = curves(tmp_path, rows[0])
    assert training == ([0.25, 0.5, 0.75, 1.0], [4.5, 3.0, 2.0, 1.0])
    assert validation == ([0.5, 1.0], [2.5, 2.0])


def test_with_e_arm_cross_entropy_is_drawn_and_not_the_whole_loss(tmp_path, rows):
    assert curves(tmp_path, rows[1])[0][1] == [1.5, 1.5]


def test_seeds_of_unequal_length_are_drawn_as_far_as_both_go(tmp_path, rows):
    training, validation = curves(tmp_path, rows[2])
    assert len(training[0]) == 2
    assert validation == ([0.5], [1.0])


def test_long_trainings_are_averaged_over_parts(tmp_path):
    write(tmp_path / "long", np.arange(600.0).tolist(), [1.0] * 300)
    (x, y), _ = curves(tmp_path, row("base", "base", ["long"]))
    assert len(x) == len(y) == 60
    assert y[0] == pytest.approx(np.arange(10).mean())
    assert x[0] == pytest.approx(np.arange(1, 11).mean() / EPOCH)


def test_losses_show_base_row_and_control(tmp_path, rows):
    drawing = losses(tmp_path, [*rows, row("label smoothing", "row", rows[0]["folders"])])
    for name in ("base", "E-ARM", "E-ARM, control"):
        assert f">{name}<" in drawing.svg
    assert "label smoothing" not in drawing.svg
    assert "currentColor" in drawing.svg
    assert drawing.alt
    assert drawing.caption


def points(epochs, weights):
    return [
        row(f"{e} {w}", "grid", [], point={"start_epoch": e, "weight": w}, control="grid, control", scratch=True)
        for e in epochs
        for w in weights
    ]


def test_the_study_has_a_line_for_each_weight_and_each_start(tmp_path, rows):
    made = [*rows[:1], *points([0.5, 1.0, 1.5], [1.0, 4.0]), row("grid, control", "control", rows[2]["folders"])]
    drawing = study(made, "perplexity")
    for label in ("weight 1", "weight 4", "start epoch 0.5", "start epoch 1.5", "control"):
        assert f">{label}<" in drawing.svg
    alone = study([*rows[:1], *points([0.5, 1.0], [1.0])], "perplexity")
    assert ">weight 1<" in alone.svg
    assert ">control<" not in alone.svg


def test_a_number_that_is_missing_is_no_point(tmp_path, rows):
    made = points([0.5, 1.0, 1.5], [1.0])
    made[1]["numbers"] = {"perplexity": summed([9.0, None])}
    assert "perplexity of" in study([*rows[:1], *made], "perplexity").alt


def test_files_are_whole_and_the_same_each_time(tmp_path, rows):
    measured = tmp_path / "seed-0" / "e-arm" / "measurement"
    measured.mkdir()
    save_file({"samples": np.zeros((4, 8, 8, 1), dtype=np.uint8)}, measured / "samples.safetensors")
    table = {"rows": rows, "main_column": "perplexity"}
    paths = draw_experiment(tmp_path, table)
    assert [path.name for path in paths] == ["losses.svg", "seed-0-e-arm.png"]
    assert matplotlib.image.imread(paths[1]).ndim == 3
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw_experiment(tmp_path, table)] == before
