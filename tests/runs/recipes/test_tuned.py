"""A tuned base: full and low-rank, stopped early, killed and resumed, and an energy on top of it."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

from freenergy import HuggingFaceLM, UserError, load, load_recipe, run
from freenergy.core.files import read_json
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.checkpoints import load_checkpoint
from freenergy.lm.presets import build
from freenergy.recipes.load import load_run, make_recipe
from freenergy.recipes.stages.language_models import load_base, lower_rungs
from freenergy.recipes.stages.negatives import chosen_windows
from freenergy.testing.runs import tiny_run
from freenergy.training.lora import LoraNetwork
from freenergy.training.settings import Optimisation, TuneSettings

SIZES = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0}
SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
CONFIGS = {
    "neox": GPTNeoXConfig(**SHAPE, max_position_embeddings=32, **SIZES),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True, **SIZES),
    "gpt2": GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=32, **SIZES),
}
TUNE = """
[base.tune]
method = "{method}"
rank = 4
block = 16
dropout = 0.1
validation_tokens = 500
[base.tune.optimisation]
steps = 12
batch_size = 4
accumulate = 2
learning_rate = 0.003
warmup = 2
validate_every = 4
checkpoint_seconds = 0.0
"""
CHANGES = ["base.optimisation.steps=6", "base.optimisation.validate_every=3"]
METHODS = ("full", "lora")


@pytest.mark.parametrize("family", CONFIGS)
def test_merged_additions_give_the_same_logits(family):
    """The merged network is a plain one of the same shape, of which the fast steps agree with a forward pass."""
    model = build(CONFIGS[family], Rng(0)).eval()
    names, tokens = dict(model.named_parameters()).keys(), torch.arange(24).reshape(2, 12)
    before = model(tokens).logits
    network = LoraNetwork(model, TuneSettings(method="lora", rank=3, alpha=5), Rng(1))
    given, rest = tokens[:, :1], torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    assert torch.equal(network.logits(given, rest), before), "B = 0: nothing has changed yet"
    with torch.no_grad():
        for weight in network.module.parameters():
            weight.normal_()
    apart = network.logits(given, rest)
    assert (apart - before).abs().max() > 0.1
    merged = network.merge()
    torch.testing.assert_close(merged(tokens).logits, apart, atol=1e-4, rtol=1e-4)
    assert dict(merged.named_parameters()).keys() == names
    assert HuggingFaceLM(merged.eval(), eos=0).decodes_by in ("compiled steps", "own steps")


def test_only_the_additions_are_trained_and_kept():
    model = build(CONFIGS["llama"], Rng(0))
    network = LoraNetwork(model, TuneSettings(method="lora", rank=3), Rng(1))
    shapes = [tuple(weight.shape) for weight in network.module.parameters()]
    assert len(shapes) == 2 * 2 * 7  # A and B of seven matrices in each of two layers
    assert all(3 in shape for shape in shapes)
    learns = {id(weight) for weight in model.parameters() if weight.requires_grad}
    assert learns == {id(weight) for weight in network.module.parameters()}
    again = LoraNetwork(build(CONFIGS["llama"], Rng(0)), TuneSettings(method="lora", rank=3), Rng(1))
    pairs = zip(network.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "drawn from its own stream"


def test_layers_to_adapt_are_chosen_by_name():
    network = LoraNetwork(build(CONFIGS["llama"], Rng(0)), TuneSettings(method="lora", targets=("q_proj",)), Rng(1))
    assert len(list(network.module.parameters())) == 2 * 2
    with pytest.raises(UserError, match=r"finds no layers to adapt.*set base.tune.targets"):
        LoraNetwork(build(CONFIGS["llama"], Rng(0)), TuneSettings(method="lora", targets=("nothing",)), Rng(1))


@pytest.fixture(scope="module", params=METHODS)
def done(request, finished_run, corpus_file):
    """A finished run base → tuned → energy of each method."""
    text = tiny_run(corpus_file, energy="product") + TUNE.format(method=request.param)
    return request.param, *finished_run(text, CHANGES)


def test_a_run_with_a_tuned_base(done):
    method, folder, _, results = done
    names = [result.name for result in results]
    assert names == ["corpus", "base", "tuned", "negatives", "energy", "candidates", "evaluation"]
    base, tuned = results[1].summary, results[2].summary
    assert tuned["method"] == method
    assert tuned["steps"] == 12
    assert tuned["validation_nats_per_token"] < tuned["validation_before"]
    assert tuned["validation_perplexity"] == pytest.approx(math.exp(tuned["validation_nats_per_token"]))
    assert tuned["parameters"] == base["parameters"], "merged"
    assert (tuned["weights"] < tuned["parameters"] / 10) == (method == "lora")
    assert tuned["cpu_seconds"] > 0
    assert not list((folder / "tuned/training").glob("*.safetensors"))
    assert results[-1].summary["joint"]["perplexity"]["certified"] < results[-1].summary["joint"]["base_perplexity"]


def test_the_energy_corrects_the_tuned_network(done):
    _, folder, _, _ = done
    this = load_run(folder)
    corpus = Corpus.open(this.stage("corpus"))
    found = lower_rungs(this, corpus)
    assert list(found) == ["base"]
    found["tuned"] = load_base(this, corpus)
    x = corpus.windows("validation").continuations(slice(0, 40))
    log_p = {name: lm.log_prob(x).double().mean() for name, lm in found.items()}
    assert log_p["tuned"] > log_p["base"]
    assert torch.equal(load(folder).base.log_prob(x), found["tuned"].log_prob(x))


def test_tuning_is_left_alone_by_what_comes_before_and_changes_what_comes_after(done, tmp_path):
    """The base's key does not know of tuning; that of the negatives does."""
    _, folder, path, _ = done
    keys = {name: read_json(folder / name / "stage.json")["key"] for name in ("base", "tuned", "negatives")}
    plain = load_recipe(str(path), CHANGES)
    again = list(run(plain, folder, stage="negatives"))
    assert all(result.was_cached for result in again)
    other = load_recipe(str(path), [*CHANGES, "base.tune.optimisation.learning_rate=0.002"])
    changed = {}
    for result in run(other, tmp_path / "run", stage="negatives", reuse=[folder]):
        changed[result.name] = read_json(tmp_path / "run" / result.name / "stage.json")["key"]
    assert changed["base"] == keys["base"]
    assert changed["tuned"] != keys["tuned"]
    assert changed["negatives"] != keys["negatives"]


def test_a_killed_tuning_ends_with_the_same_bits(done, tmp_path, begin):
    """kill −9 between two checkpoints and restart: dropout, order of blocks and additions have their own streams."""
    _, folder, path, _ = done
    metrics = tmp_path / "run/tuned/training/metrics.jsonl"
    changes = [word for change in CHANGES for word in ("--set", change)]
    command = ("run", path, "--out", tmp_path / "run", "--stage", "tuned", *changes)
    begin(*command).kill_when(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 5)
    begin(*command).succeed()
    for name in ("model/model.safetensors", "base.json"):
        assert (tmp_path / "run/tuned" / name).read_bytes() == (folder / "tuned" / name).read_bytes()


def test_early_stopping_keeps_the_base_where_no_step_is_better(done, tmp_path):
    """A learning rate that only destroys: the weights are those of step 0."""
    method, folder, path, _ = done
    rate = {"full": 3.0, "lora": 30.0}[method]
    changes = [*CHANGES, f"base.tune.optimisation.learning_rate={rate}", "base.tune.optimisation.steps=1"]
    results = list(run(load_recipe(str(path), changes), tmp_path / "run", stage="tuned", reuse=[folder]))
    summary = results[-1].summary
    assert summary["best_step"] == 0
    assert summary["validation_nats_per_token"] == summary["validation_before"]
    old, new = (load_checkpoint(place / "model")[0] for place in (folder / "base", tmp_path / "run/tuned"))
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("changes", "tuned", "left_out"),
    [
        ([], 1.0, None),
        (["base.tune.documents=0.5"], 0.5, 0.5),
        (["base.local={order=2, documents=0.6, num_windows=10}"], 0.6, 0.6),
        (["base.local={order=2, documents=0.6, num_windows=10}", "base.tune.documents=0.7"], 0.7, 0.7),
        (["base.local={order=2, documents=0.6, num_windows=10}", "base.tune.documents=1.0"], 1.0, 0.6),
    ],
)
def test_energies_learn_from_documents_that_no_rung_has_read(done, tmp_path, changes, tuned, left_out):
    """Counts, tuning and energy are cross-fitted; tuning on all documents is what any trained base does."""
    method, folder, path, _ = done
    if method == "lora":
        pytest.skip("the split does not depend on the method")
    more = [*CHANGES, *changes, "base.tune.optimisation.steps=4"]
    out = tmp_path / "run"
    stages = run(load_recipe(str(path), more), out, stage="negatives", reuse=[folder])
    results = {each.name: each.summary for each in stages}
    this, corpus = load_run(out), Corpus.open(out / "corpus")
    available = corpus.report.splits["train"].documents
    assert results["tuned"]["documents"] == round(tuned * available)
    if left_out is None:
        assert "documents_left_out" not in results["negatives"]
        return
    assert results["negatives"]["documents_left_out"] == round(left_out * available)
    documents = corpus.windows("train").documents
    assert (documents[chosen_windows(this, corpus, "train").numpy()] >= round(left_out * available)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "rank is 0: set it to 1 or more"),
        ({"documents": 0.0}, "documents is 0.0: set it above 0 and at most 1"),
        ({"documents": 1.5}, "documents is 1.5: set it above 0 and at most 1"),
        ({"dropout": 1.0}, "dropout is 1.0: set it to at least 0 and below 1"),
        ({"targets": ("q_proj",)}, "targets name the layers that LoRA adapts"),
    ],
)
def test_bad_settings_are_one_sentence(change, words):
    with pytest.raises(UserError, match=words):
        TuneSettings(**change)


@pytest.mark.parametrize("base", [{"kind": "ngram"}, {"kind": "remote", "url": "http://127.0.0.1:1/v1"}])
def test_bases_without_weights_are_not_tuned(base):
    recipe = {"name": "x", "corpus": {"source": "wikitext-2"}, "base": {**base, "tune": {}}}
    with pytest.raises(UserError, match=r"unknown key base.tune; only base of kind pretrained or train has it"):
        make_recipe(recipe)


def test_a_family_without_the_stage_says_so():
    table = {"name": "x", "family": "language-model", "corpus": {"source": "wikitext-2"}, "base": {"tune": {}}}
    with pytest.raises(UserError, match=r"no stage that tunes: leave base.tune out"):
        make_recipe(table)


def test_keys_that_a_recipe_does_not_set_are_those_of_tuning():
    """Half a table of optimisation does not fall back to the rates of training from scratch."""
    table = {"name": "x", "corpus": {"source": "wikitext-2"}, "base": {"tune": {"optimisation": {"steps": 7}}}}
    found, own = make_recipe(table).base, TuneSettings().optimisation
    assert found.tune.optimisation == replace(own, steps=7)
    assert own.learning_rate == 1e-4
    assert make_recipe(make_recipe(table).to_json()).base == found
    assert found.optimisation == Optimisation()
