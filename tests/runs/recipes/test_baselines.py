"""The stage ``baselines``: every kind learns in a run, is opened again, and survives a kill."""

import pytest
import torch

from freenergy import Corpus, HuggingFaceLM, UserError, load_recipe, run
from freenergy.core.files import file_hash, read_json
from freenergy.lm.adapted import AdaptedLM
from freenergy.lm.load import load_lm
from freenergy.recipes import load_run
from freenergy.recipes.load import make_recipe
from freenergy.recipes.stages.baselines import baseline_records, open_baselines
from freenergy.testing.runs import tiny_run
from freenergy.training.baselines.residual import ResidualLM

STEPS = """
[baselines.optimisation]
steps = 8
batch_size = 4
accumulate = 2
learning_rate = 3e-3
warmup = 2
validate_every = 4
checkpoint_seconds = 0.0
"""
SMALL = "block = 16\nvalidation_tokens = 500\n"
BASELINES = f"""
[[baselines]]
kind = "longer"
dropout = 0.1
{SMALL}{STEPS}
[[baselines]]
kind = "balm"
extra = 100000
{SMALL}{STEPS}
[[baselines]]
kind = "ralm"
{SMALL}{STEPS}
[[baselines]]
kind = "local"
name = "local-ngram"
order = 2
windows = 10
[[baselines]]
kind = "local"
name = "local-both"
features = "both"
order = 2
windows = 10
rank = 4
{SMALL}{STEPS}
"""
CHANGES = ["base.optimisation.steps=20", "base.optimisation.validate_every=10"]
NAMES = ["longer", "balm", "ralm", "local-ngram", "local-both"]


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    folder, _, results = finished_run(tiny_run(corpus_file) + BASELINES, CHANGES, stage="baselines")
    return folder, results


def held_out(folder):
    corpus = Corpus.open(folder / "corpus")
    return corpus, corpus.windows("test").continuations(slice(0, 30))


def test_every_kind_learns_and_is_opened_again(done):
    folder, results = done
    assert [result.name for result in results] == ["corpus", "base", "baselines"]
    this, (corpus, x) = load_run(folder), held_out(folder)
    base = load_lm(folder / "base", corpus.tokenizer)
    models = open_baselines(this, corpus)
    assert list(models) == NAMES
    kinds = [HuggingFaceLM, HuggingFaceLM, ResidualLM, AdaptedLM, AdaptedLM]
    assert [type(model) for model in models.values()] == kinds
    nats = {name: -model.log_prob(x).mean().item() for name, model in models.items()}
    of_base = -base.log_prob(x).mean().item()
    for name in set(NAMES) - {"balm"}:  # a network of eight steps from scratch need not beat one of twenty
        assert nats[name] < of_base - 0.05, name
    for name, model in models.items():
        total = model.next_log_probs(x.contexts[:2]).double().exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0, msg=name)


def test_records_say_what_it_has_cost(done):
    folder, results = done
    records = baseline_records(load_run(folder))
    assert records == results[-1].summary
    base = results[1].summary["parameters"]
    assert records["longer"]["parameters"] == base
    assert records["balm"]["parameters"] == pytest.approx(base + 100_000, rel=0.05)
    head = 400 * 256
    assert records["ralm"]["parameters"] == 2 * base + head
    assert records["local-ngram"]["parameters"] == base + 1 + 2 + 4 + 3
    assert records["local-both"]["parameters"] == base + 10 + 4 * (2 * 256 + 400) + 2  # a probe reads two of its layers
    for name in ("longer", "balm", "ralm", "local-both"):
        assert records[name]["steps"] == 8
        assert records[name]["tokens"] >= 8 * 4 * 16
        assert records[name]["cpu_seconds"] > 0
    fit = records["local-ngram"]["fit"]
    assert fit["converged"]
    assert fit["nats_per_token_fitted"] < fit["nats_per_token_before"]
    assert not list(folder.glob("baselines/*/training/*.safetensors"))  # moments are not kept


def test_nothing_is_done_twice_and_other_stages_keep_their_keys(done):
    folder, _ = done
    this = load_run(folder)
    again = list(run(this.recipe, folder, stage="baselines"))
    assert all(result.was_cached for result in again)
    table = this.recipe.to_json() | {"baselines": []}
    *_, base = run(make_recipe(table), folder, stage="base")
    assert base.was_cached
    list(run(this.recipe, folder, stage="baselines"))


def test_a_base_of_counts_has_a_local_counterpart(write_recipe, tmp_path):
    path = write_recipe(tmp_path, '[[baselines]]\nkind = "local"\norder = 3\nwindows = 10\n', base="counts")
    list(run(load_recipe(str(path)), tmp_path / "out", stage="baselines"))
    corpus, x = held_out(tmp_path / "out")
    base = load_lm(tmp_path / "out" / "base", corpus.tokenizer)
    local = open_baselines(load_run(tmp_path / "out"), corpus)["local"]
    assert local.log_prob(x).mean() > base.log_prob(x).mean() + 0.05
    for baseline in ('{kind="longer"}', '{kind="ralm"}', '{kind="local", features="probe"}', '{kind="balm"}'):
        with pytest.raises(UserError, match="needs the base's network, and a base of kind 'ngram' has none"):
            list(run(load_recipe(str(path), [f"baselines=[{baseline}]"]), tmp_path / "other"))
    assert not (tmp_path / "other" / "corpus").exists()


BAD = [
    ('[{kind="longer", optimisation={steps=0}}]', "steps is 0: set it to 1 or more"),
    ('[{kind="longer"}, {kind="longer"}]', "two baselines are named 'longer'"),
    ('[{kind="longer", name="../away"}]', r"name is '\.\./away'"),
    ('[{kind="shorter"}]', r"baselines\.0\.kind is 'shorter'; choose one of"),
    ('[{kind="ralm", order=3}]', r"unknown key baselines\.0\.order"),
    ('[{kind="local", features="magic"}]', r"baselines\.0\.features is 'magic'"),
    ('[{kind="local", order=9}]', "order is 9: set it to at least 1 and at most 8"),
    ('[{kind="balm", parameters="preset", extra=5}]', "extra is 5 and parameters"),
    ('[{kind="balm", preset="huge"}]', "there is no preset 'huge'"),
    ('[{kind="ralm", optimisation={preset="paper"}}]', "no optimisation preset 'paper'"),
    ('[{kind="longer", block=300}]', "must fit the 256 of the network of the baseline 'longer'"),
    ('[{kind="local", features="probe", layers=[9]}]', "the base has no layer 9"),
]


@pytest.mark.parametrize(("baselines", "words"), BAD)
def test_bad_settings_are_one_sentence(done, baselines, words):
    path, changes = done[0].parent / "small.toml", [*CHANGES, f"baselines={baselines}"]
    with pytest.raises(UserError, match=words) as found:
        list(run(load_recipe(str(path), changes), path.parent / "bad", stage="baselines"))
    assert "\n" not in str(found.value)


def test_a_served_base_shows_too_little(write_recipe, tmp_path):
    path = write_recipe(tmp_path)
    changes = ['base={kind="remote", url="http://127.0.0.1:9/v1"}', 'baselines=[{kind="local"}]']
    with pytest.raises(UserError, match="which a served model does not show"):
        list(run(load_recipe(str(path), changes), tmp_path / "out"))


def test_a_preset_of_the_paper_reaches_a_baseline(write_recipe, tmp_path):
    path = write_recipe(tmp_path)
    change = 'baselines=[{kind="ralm", optimisation={preset="paper-ralm", steps=5}}]'
    (ralm,) = load_recipe(str(path), [change]).baselines
    found = ralm.optimisation
    assert (found.batch_size, found.warmup, found.steps) == (64, 2000, 5)


def test_the_recipe_that_comes_with_the_package_has_the_base_and_the_energy_of_the_demo():
    demo, ours = (load_recipe(name).to_json() for name in ("demo-tiny", "wikitext-baselines"))
    assert {key for key in demo if demo[key] != ours[key]} <= {"name", "about", "baselines", "evaluation"}
    names = [each["name"] for each in ours["baselines"]]
    assert names == ["longer", "balm", "ralm", "local-ngram", "local-probe", "local-both"]


@pytest.mark.faults
def test_kill_9_ends_with_the_same_bits(done, write_recipe, tmp_path, begin):
    path = write_recipe(tmp_path, BASELINES)
    cut, changes = tmp_path / "cut", [word for change in CHANGES for word in ("--set", change)]
    command = ["run", path, "--stage", "baselines", *changes, "--out", cut]

    def after(name, steps):
        metrics = cut / "baselines" / name / "training" / "metrics.jsonl"
        return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps

    moments = [after("longer", 3), after("ralm", 6), (cut / "baselines/local-ngram/ngram").exists]
    for moment in [*moments, after("local-both", 5)]:
        begin(*command).kill_when(moment)
        assert not (cut / "baselines" / "stage.json").exists()
    begin(*command).succeed()
    assert bits(cut) == bits(done[0])


def bits(folder):
    """Every file of the stage but those that hold times; records without their times."""
    skipped = {"metrics.jsonl", "stage.json"}
    found = {}
    for path in sorted((folder / "baselines").rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "record.json":
            found[name] = {key: value for key, value in read_json(path).items() if key != "cpu_seconds"}
        elif path.is_file() and path.name not in skipped:
            found[name] = file_hash(path)
    assert sum(name.endswith(".safetensors") for name in found) == 3 + 3 + 1 + 3
    return found
