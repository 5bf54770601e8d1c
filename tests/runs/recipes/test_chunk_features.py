"""A run with statistics, repetition and a second language model: one convex fit, and its learning curve."""

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
