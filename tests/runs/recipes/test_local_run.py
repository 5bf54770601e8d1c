"""A base with a local mix, through a whole run: drawn from, corrected by an energy, killed and resumed, saved."""

import numpy as np
import pytest
import torch

from freenergy import ResidualModel, UserError, load, load_base, load_recipe, run
from freenergy.core.files import read_json
from freenergy.corpus import Corpus
from freenergy.lm.adapted import AdaptedLM
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.noise.store import NegativeStore
from freenergy.recipes.load import load_run
from freenergy.recipes.stages.language_models import lower_rungs
from freenergy.recipes.stages.negatives import chosen_windows, stored_identity
from freenergy.testing.runs import tiny_run

LOCAL = """
[base.local]
order = 3
num_windows = 20
l2 = 1e-3
documents = 0.6
"""
CHANGES = ["base.optimisation.steps=6", "base.optimisation.validate_every=3"]


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    """base → local → energy, with a probe that reads hidden states while the mix draws."""
    return finished_run(tiny_run(corpus_file, energy="product") + LOCAL, CHANGES)


def test_a_run_with_a_local_mix(done):
    folder, _, results = done
    names = [result.name for result in results]
    assert names == ["corpus", "base", "local", "negatives", "energy", "candidates", "evaluation"]
    local, evaluation = results[2].summary, results[-1].summary
    assert local["converged"]
    assert local["nats_per_token_fitted"] < local["nats_per_token_before"]
    assert len(local["weights"]) == 1 + 3 + 4 + 3
    assert [rung["name"] for rung in evaluation["ladder"]][:2] == ["base", "local"]
    base = load_base(folder).lm
    assert isinstance(base, AdaptedLM)
    assert isinstance(base.base, HuggingFaceLM)
    corpus = Corpus.open(folder / "corpus")
    x = corpus.windows("test").continuations(slice(0, 60))
    (plain,) = lower_rungs(load_run(folder), corpus).values()
    assert base.log_prob(x).mean() > plain.log_prob(x).mean(), "it pays on text that nothing was fitted to"


def test_energies_learn_from_documents_that_were_not_counted(done):
    folder, _, results = done
    this, corpus = load_run(folder), Corpus.open(folder / "corpus")
    counted = results[2].summary["documents"]
    assert counted == round(0.6 * corpus.report.splits["train"].documents)
    assert results[3].summary["documents_left_out"] == counted
    store = NegativeStore.open(folder / "negatives/train", stored_identity(this, corpus, "train"))
    documents = corpus.windows("train").documents
    assert (documents[store.rows.numpy()] >= counted).all()
    assert len(chosen_windows(this, corpus, "validation")) == 16, "held-out text is all there"
    bounds, mix = corpus.documents("train"), load_base(folder).lm
    text = corpus.stream("train")[: bounds[counted]]
    assert mix.counts.documents == counted == int((np.asarray(text) == corpus.tokenizer.eos).sum())


def test_the_residual_model_stands_on_the_mix(done, tmp_path):
    """What is drawn, certified and saved is the energy's correction of the mix."""
    folder, _, _ = done
    joint = load(folder)
    assert isinstance(joint.base, AdaptedLM)
    joint.save_pretrained(tmp_path / "saved")
    again = ResidualModel.from_pretrained(tmp_path / "saved")
    x = Corpus.open(folder / "corpus").windows("test").continuations(slice(0, 8))
    assert torch.equal(again.base.log_prob(x), joint.base.log_prob(x))
    torch.testing.assert_close(again.energy(x), joint.energy(x), rtol=0, atol=1e-5)
    first, second = (model.sample("The module", n=8, seed=3).texts for model in (joint, again))
    assert first == second


def test_keys(done, tmp_path):
    """The base's key does not know of the mix; those of the mix and of what is drawn do."""
    folder, path, _ = done
    keys = {name: read_json(folder / name / "stage.json")["key"] for name in ("base", "local", "negatives")}
    other = load_recipe(str(path), [*CHANGES, "base.local.copy=false"])
    found = {}
    for result in run(other, tmp_path / "run", stage="negatives", reuse=[folder]):
        found[result.name] = read_json(tmp_path / "run" / result.name / "stage.json")["key"]
    assert found["base"] == keys["base"]
    assert found["local"] != keys["local"]
    assert found["negatives"] != keys["negatives"]
    assert len(load_base(tmp_path / "run").lm.weights) == 1 + 3 + 4


def test_killed_and_resumed_it_ends_with_the_same_bits(done, tmp_path, begin):
    folder, path, _ = done
    changes = [word for change in CHANGES for word in ("--set", change)]
    command = ("run", path, "--out", tmp_path / "run", *changes)
    begin(*command).kill_when((tmp_path / "run/local").is_dir)
    begin(*command).kill_when((tmp_path / "run/negatives/train").is_dir)
    begin(*command).succeed()
    places = ("local/base.json", "local/mix", "negatives/*/*.parquet", "energy/model", "evaluation/evaluation.json")
    found = [path for place in places for each in folder.glob(place) for path in (each, *each.rglob("*"))]
    names = [path.relative_to(folder) for path in found if path.is_file()]
    assert len(names) > 10
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes(), name


def test_an_ngram_base_has_a_mix_too(finished_run, corpus_file):
    text = tiny_run(corpus_file, base="counts", energy="ngram") + LOCAL
    folder, _, results = finished_run(text, ["base.order=3"])
    assert [result.name for result in results][1:3] == ["base", "local"]
    assert results[2].summary["nats_per_token_fitted"] < results[2].summary["nats_per_token_before"]
    assert isinstance(load(folder).base, AdaptedLM)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("base.local.documents=1.0", r"documents is 1.*set it below 1"),
        ("base.local.documents=1.5", r"at most 1"),
        ("base.local.order=-1", r"order is -1"),
        ("base.local.num_windows=0", r"num_windows is 0"),
    ],
)
def test_wrong_settings_are_one_sentence(change, words, tmp_path, corpus_file):
    path = tmp_path / "small.toml"
    path.write_text(tiny_run(corpus_file, base="counts", energy="ngram") + LOCAL)
    with pytest.raises(UserError, match=words):
        list(run(load_recipe(str(path), [change]), tmp_path / "run"))


def test_without_a_document_left_there_is_no_energy(tmp_path, corpus_file):
    path = tmp_path / "small.toml"
    path.write_text(tiny_run(corpus_file, base="counts", energy="ngram") + LOCAL)
    with pytest.raises(UserError, match=r"no window of the others is left.*base.local.documents lower"):
        list(run(load_recipe(str(path), ["base.local.documents=0.999"]), tmp_path / "run"))
