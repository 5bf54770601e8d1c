"""A run with statistics, repetition and a second language model: one convex fit, and its learning curve."""

import math

import pytest

from freenergy import UserError, load, load_recipe, run
from freenergy.core.progress import Silent
from freenergy.recipes.load import load_run
from freenergy.report import write_report
from freenergy.testing.runs import tiny_run

CHANGES = ["base.optimisation.steps=6", "base.optimisation.validate_every=3"]
ENERGY = """
[negatives]
per_prefix = 4
windows = 24
validation_windows = 16
validation_per_prefix = 7
shard = 8
[energy]
kind = "product"
parts = [
  {{ kind = "probe", states = false }},
  {{ kind = "repetition" }},
  {{ kind = "second-lm", path = "{path}" }},
]
[training]
curve = true
"""


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    """The second model is the base of another seed, trained for longer."""
    plain = tiny_run(corpus_file)
    other, _, _ = finished_run(plain, ["base.optimisation.steps=30"], stage="base")
    return finished_run(plain + ENERGY.format(path=other / "base/model"), CHANGES)


def test_the_parts_are_one_fit_and_the_curve_is_reported(done):
    folder, _, results = done
    energy = {result.name: result.summary for result in results}["energy"]
    assert [part["kind"] for part in energy["parts"]] == ["probe", "repetition", "second-lm"]
    assert [part["weights"] for part in energy["parts"]] == [14, 16, 1]
    assert len({part["l2"] for part in energy["parts"]}) == 1
    curve = energy["learning_curve"]
    assert [row["windows"] for row in curve["rows"]] == [6, 12, 24]
    assert curve["rows"][-1]["gain"] == pytest.approx(energy["validation"]["certified_gain"], abs=1e-5)
    second = load(folder).energy.parts[2]
    assert second.weight.item() > 0, "a model that was trained for longer is worth listening to"
    page = write_report(load_run(folder), Silent()).read_text()
    assert "Gain against training windows" in page
    assert (folder / "figures/learning.png").is_file()


def test_a_curve_needs_linear_parts(done, tmp_path):
    _, path, _ = done
    recipe = load_recipe(str(path), [*CHANGES, 'energy={kind="log-ratio"}'])
    with pytest.raises(UserError, match="a learning curve is that of linear energies"):
        list(run(recipe, tmp_path / "run"))


def test_all_rungs_in_chunks_of_two_tokens(done, tmp_path):
    """base → tuned → local → energy, drawn, fitted and certified two tokens at a time: no feature needs more."""
    folder, path, _ = done
    changes = [
        *CHANGES,
        "chunk=2",
        "evaluation.position_windows=0",
        "base.tune={block=16, validation_tokens=500, optimisation={steps=4, batch_size=4, validate_every=4}}",
        "base.local={order=2, documents=0.6, num_windows=10}",
    ]
    stages = run(load_recipe(str(path), changes), tmp_path / "run", reuse=[folder])
    results = {each.name: each.summary for each in stages}
    assert list(results) == [
        "corpus", "base", "tuned", "local", "negatives", "energy", "candidates", "evaluation",
    ]  # fmt: skip
    assert [rung["name"] for rung in results["evaluation"]["ladder"]][:3] == ["base", "tuned", "local"]
    assert all(row["gain"] <= math.log(8) for row in results["energy"]["learning_curve"]["rows"])
    assert results["evaluation"]["joint"]["perplexity"]["certified"] > 1
