"""Runs whose negatives are not the base's own: a tempered law is corrected for, a learned noise trains along."""

import pytest

from freenergy import UserError, load_recipe, run
from freenergy.testing.runs import tiny_run

SHORT = ["base.optimisation.steps=6", "base.optimisation.validate_every=3"]
UNIT = """
[energy]
kind = "unit"
[training]
negatives = 2
[training.optimisation]
steps = 4
batch_size = 4
validate_every = 2
checkpoint_seconds = 0.0
[negatives]
windows = 24
validation_windows = 16
validation_per_prefix = 7
"""


def summaries(results):
    return {result.name: result.summary for result in results}


def test_a_learned_noise(finished_run, corpus_file):
    noise = 'fresh = true\nsources = [{kind = "learned", rate = 0.5}]\n'
    folder, _, results = finished_run(tiny_run(corpus_file) + UNIT + noise, SHORT)
    found = summaries(results)
    assert found["energy"]["negatives_relative"] is False
    assert "noise_cross_entropy" in (folder / "energy" / "training-0" / "metrics.jsonl").read_text()
    assert found["evaluation"]["joint"]["gain"]["nats_per_sequence"] < 3


def test_a_tempered_noise_of_counts(finished_run, corpus_file):
    recipe = tiny_run(corpus_file, base="counts", energy="ngram")
    changes = ['negatives.sources=[{kind="base",temperature=0.7}]']
    found = summaries(finished_run(recipe, changes)[2])
    assert found["negatives"]["relative_to_another_law"] is False
    assert found["energy"]["negatives_relative"] is False
    relative = summaries(finished_run(recipe, ['negatives.sources=[{kind="base",top_k=3}]'])[2])
    assert relative["energy"]["negatives_relative"] is True
    gains = [each["energy"]["validation"]["certified_gain"] for each in (found, relative)]
    assert gains[0] > gains[1]  # what is corrected for aims at the gain over the base


def test_a_learned_noise_needs_a_network(corpus_file, tmp_path):
    path = tmp_path / "small.toml"
    noise = 'fresh = true\nsources = [{kind = "learned"}]\n'
    path.write_text(tiny_run(corpus_file, base="counts") + UNIT.replace("unit", "bit") + noise)
    with pytest.raises(UserError, match="a learned noise starts as a copy of the base's network"):
        list(run(load_recipe(str(path)), tmp_path / "run"))
