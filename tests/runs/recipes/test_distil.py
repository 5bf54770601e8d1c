"""``distil`` on a run: a checkpoint that others can use, numbers that agree with the run's, and no work done twice."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freenergy import Corpus, UserError, load_recipe, run
from freenergy.core.files import file_hash, read_json
from freenergy.lm.load import load_lm
from freenergy.recipes.stages.distil import distil
from freenergy.testing.runs import tiny_run
from freenergy.training.settings import Optimisation
from freenergy.training.tasks.distil import Distilling

CHANGES = [
    "base.optimisation.steps=30",
    "evaluation.candidates=16",
    "evaluation.certified_windows=8",
]
SHORT = Distilling(
    draws=8,
    validation_draws=16,
    optimisation=Optimisation(
        steps=6, batch_size=8, accumulate=2, learning_rate=3e-4, warmup=2, weight_decay=0.0, validate_every=2,
        checkpoint_seconds=0.0,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(finished_run, corpus_file):
    """A run with an energy."""
    return finished_run(tiny_run(corpus_file, energy="ngram"), CHANGES)[0]


@pytest.fixture(scope="module")
def distilled(finished, tmp_path_factory):
    """What distilling it has left, and has said."""
    out = tmp_path_factory.mktemp("out") / "policy"
    return out, distil(finished, SHORT, out)


def test_what_is_said(finished, distilled):
    out, told = distilled
    assert told == read_json(out / "distilled.json")
    assert told["training"]["steps"] == 6
    assert told["training"]["chosen_step"] in (2, 4, 6)
    assert told["training"]["kl_after"] < told["training"]["kl_before"]
    for name in ("kl", "total_variation"):
        before, after, less = (told[name][key]["value"] for key in ("before", "after", "less"))
        assert less == pytest.approx(before - after, abs=1e-12)
        low, high = told[name]["less"]["interval"]
        assert low < less < high
    assert told["kl"]["after"]["value"] > 0
    assert 0 < told["total_variation"]["after"]["value"] < 1
    assert (told["draws"], told["candidates"]["draws"]) == (30, 15)
    assert 1 <= told["ess"]["value"] <= 30
    for name in ("base", "distilled"):
        worth = told["candidates"][name]
        assert 1 <= worth["ess"]["value"] <= 15
        assert 1 / 15 <= worth["largest_share"]["value"] <= 1
        assert worth["certified_perplexity"]["interval"][0] < worth["certified_perplexity"]["value"]


def test_the_numbers_are_those_of_the_runs_own_evaluation(finished, distilled):
    _, told = distilled
    own = read_json(finished / "evaluation" / "evaluation.json")
    assert told["split"] == own["split"]
    assert told["perplexity"]["base"]["perplexity"] == pytest.approx(own["base"]["perplexity"])
    assert told["perplexity"]["joint_certified"]["value"] == pytest.approx(own["joint"]["perplexity"]["certified"])
    of_base = told["candidates"]["base"]
    assert of_base["certified_perplexity"] == told["perplexity"]["joint_certified"]
    assert of_base["ess"]["value"] == pytest.approx(own["joint"]["ess"])
    assert of_base["log_partition"]["value"] == pytest.approx(own["joint"]["log_partition"]["lower"])
    percent = told["perplexity"]["distilled"]["against_base"]["percent"]
    base, policy = own["base"]["perplexity"]["token"], told["perplexity"]["distilled"]["perplexity"]
    assert percent == pytest.approx(100 * (1 - policy / base))


def test_the_folder_is_a_checkpoint(finished, distilled, write_recipe, tmp_path):
    out, told = distilled
    assert not (out / "work").exists()
    assert {path.suffix for path in out.iterdir() if not path.name.startswith(".")} <= {
        ".json",
        ".jsonl",
        ".safetensors",
    }
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    corpus = Corpus.open(finished / "corpus")
    assert tokenizer("return a new", add_special_tokens=False)["input_ids"] == corpus.tokenizer.encode("return a new")
    path = write_recipe(tmp_path)
    head, tail = path.read_text().split("[base]")
    base = f'[base]\nkind = "pretrained"\npath = "{out}"\n'
    path.write_text(head.split("[tokenizer]")[0] + f'[tokenizer]\nkind = "pretrained"\npath = "{out}"\n' + base)
    path.write_text(path.read_text() + "[evaluation]" + tail.split("[evaluation]")[1])
    *_, evaluation = run(load_recipe(str(path)), tmp_path / "again")
    assert evaluation.summary["base"]["perplexity"]["token"] == pytest.approx(
        told["perplexity"]["distilled"]["perplexity"]
    )
    lm = load_lm(finished / "base", corpus.tokenizer)
    x = corpus.windows("test").continuations([0, 1])
    ids = x.joined().tokens
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, lm.model(ids).logits, atol=1e-3), "it is still the base"


def test_nothing_is_done_twice_and_other_settings_are_refused(finished, distilled):
    out, told = distilled
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert distil(finished, SHORT, out) == told
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == before
    with pytest.raises(UserError, match="begun with other settings"):
        distil(finished, replace(SHORT, draws=5), out)
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")} == before


def test_the_command(finished, tmp_path, call):
    few = ("--steps", 2, "--contexts", 2, "--draws", 4, "--validate-every", 1)
    status, out, err = call("distil", finished, "--out", tmp_path / "out", *few, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["training"]["steps"] == 2
    status, out, err = call("distil", finished, "--out", tmp_path / "out", *few)  # nothing is done again
    assert status == 0, err
    for words in ("KL(residual model", "effective of", "model, certified", "distilled"):
        assert words in out


def test_where_no_step_is_nearer_it_is_the_base_and_says_so(finished, tmp_path):
    steps = replace(SHORT.optimisation, learning_rate=10.0, warmup=0, steps=2)
    told = distil(finished, replace(SHORT, optimisation=steps), tmp_path / "out")
    assert told["training"]["chosen_step"] == 0
    assert told["verdict"].startswith("no step came nearer to the model than the base")
    assert told["kl"]["less"]["value"] == pytest.approx(0, abs=1e-5)
    assert told["perplexity"]["distilled"]["against_base"]["percent"] == 0
    assert math.isfinite(told["kl"]["after"]["value"])


def test_bad_input_is_one_sentence(finished, write_recipe, tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        distil(tmp_path / "nothing", SHORT, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds files that no run has made"):
        distil(finished, SHORT, tmp_path / "full")
    with pytest.raises(UserError, match="holds files that no run has made"):
        distil(finished, SHORT, tmp_path / "full" / "thesis.tex")
    with pytest.raises(UserError, match="holds files that no run has made"):
        distil(finished, SHORT, finished)
    with pytest.raises(UserError, match="steps is 0: set it to 1 or more"):
        replace(SHORT.optimisation, steps=0)
    many = replace(SHORT, optimisation=replace(SHORT.optimisation, batch_size=100_000))
    with pytest.raises(UserError, match="a step takes 100000"):
        distil(finished, many, tmp_path / "many")
    assert [path.name for path in (tmp_path / "many").iterdir()] == [".lock"], "another try must find it empty"
    list(run(load_recipe(str(write_recipe(tmp_path, base="counts"))), tmp_path / "plain", stage="corpus"))
    with pytest.raises(UserError, match="has no energy, so there is no residual model to distil"):
        distil(tmp_path / "plain", SHORT, tmp_path / "out")
    counts = write_recipe(tmp_path, base="counts", energy="ngram")
    list(run(load_recipe(str(counts)), tmp_path / "ngram", stage="corpus"))
    with pytest.raises(UserError, match="a base of kind 'ngram' has none"):
        distil(tmp_path / "ngram", SHORT, tmp_path / "out")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(finished, unfinished)
    (unfinished / "candidates" / "stage.json").unlink()
    with pytest.raises(UserError, match=r"the stage candidates of .* is not finished"):
        distil(unfinished, SHORT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.faults
def test_kill_9_ends_with_the_same_bits(finished, distilled, tmp_path, fork):
    out, _ = distilled
    cut = tmp_path / "cut"
    work = cut / "work"

    def act():
        distil(finished, SHORT, cut)

    def after(steps):
        metrics = work / "training" / "metrics.jsonl"
        return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps

    def any_file(pattern):
        return lambda: any(work.glob(pattern))

    moments = [
        (cut / ".lock").exists,
        any_file("proposals/*.json"),
        after(5),
        any_file("draws/shard-00000.parquet"),
        (cut / "config.json").exists,
    ]
    for moment in moments:
        assert not (cut / "distilled.json").exists()
        fork(act).kill_when(moment)  # the last one may come when all is written, which is no harm
    fork(act).succeed()
    assert bits(cut) == bits(out)


def bits(folder):
    """Every file but the lock and the records of times."""
    skipped = {".lock", "metrics.jsonl", "stage.json"}
    return {path.name: file_hash(path) for path in folder.rglob("*") if path.is_file() and path.name not in skipped}
