"""A run with ``chunk = m``: chunk windows in every stage, the summed certificate, and text written chunk by chunk."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from freenergy import Rng, UserError, load, load_recipe, run, write_report
from freenergy.core.files import read_json, read_tensors
from freenergy.core.progress import Silent
from freenergy.partition import certified_gain
from freenergy.recipes import load_run
from freenergy.recipes.stages.candidates import open_candidates
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.compare import compare_rows
from freenergy.recipes.stages.evaluation import EvaluationRequest, evaluate
from freenergy.samplers import Resampling
from freenergy.testing.runs import tiny_run
from freenergy.web.model_server import ModelServer

CHUNKED = ["corpus.continuation=7", "chunk=3", "evaluation.position_windows=0"]  # chunks of 3, 3 and 1 tokens


def recipe_of(corpus_file, **others):
    return tiny_run(corpus_file, base="counts", energy="ngram", with_baseline=True, **others)


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    """A finished run in chunks, and its recipe."""
    folder, recipe, _ = finished_run(recipe_of(corpus_file), CHUNKED)
    return folder, recipe


@pytest.fixture(scope="module")
def whole(finished_run, corpus_file):
    """The same run in whole windows."""
    return finished_run(recipe_of(corpus_file), [CHUNKED[0], CHUNKED[2]])[0]


def chunk_scores(folder):
    this = load_run(folder)
    corpus = open_corpus(this)
    windows, store = corpus.windows("test"), open_candidates(this, corpus)
    parts = [read_tensors(path) for path in sorted((folder / "evaluation" / "scores").glob("*.safetensors"))]
    log_base, energy = (torch.cat([part[name] for part in parts]) for name in ("log_base", "energy"))
    return corpus, windows, store, log_base, energy


def test_all_chunks_of_every_window_are_measured_in_order(done, whole):
    corpus, windows, store, log_base, _ = chunk_scores(done[0])
    rows = store.rows.numpy()
    at = windows.chunks.at(rows)
    assert at.skipped.tolist() == [0, 3, 6] * 6
    assert at.room.tolist() == [3, 3, 1] * 6
    plain = open_candidates(load_run(whole), open_corpus(load_run(whole))).rows
    assert windows.whole_of(rows).tolist() == plain.tolist()
    x, true = windows.continuations(rows), corpus.in_chunks(()).windows("test").continuations(plain)
    for b, (context, (text,)) in enumerate(zip(true.contexts.lists(), true.lists(), strict=True)):
        three = x[3 * b : 3 * b + 3]
        assert three.contexts.lists() == [context + text[:k] for k in (0, 3, 6)]
        assert [one for (one,) in three.lists()] == [text[:3], text[3:6], text[6:]]
    lm = load(done[0]).base
    summed = np.add.reduceat(log_base[:, 0].numpy(), np.arange(0, 18, 3))
    np.testing.assert_allclose(summed, lm.log_prob(true)[:, 0].numpy(), rtol=1e-9)
    draws = store.draws(torch.arange(18), x.contexts)
    assert draws.x.lengths.tolist() == [[n] * 7 for _ in range(6) for n in (3, 3, 1)]


def test_the_report_is_the_sum_of_the_chunks_and_names_its_sampler(done):
    *_, log_base, energy = chunk_scores(done[0])
    summary = read_json(done[0] / "evaluation" / "evaluation.json")
    joint, gain = summary["joint"], certified_gain(energy[:, 0], energy[:, 1:])
    assert joint["windows"] == 6
    assert joint["sampler"] == "resampling chunk by chunk, m = 3, n = 8"
    assert joint["gain"]["nats_per_sequence"] == pytest.approx(float(gain.sum()) / 6)
    assert joint["perplexity"]["certified"] == pytest.approx(math.exp(-float((log_base[:, 0] + gain).sum()) / 42))
    assert joint["gain"]["ceiling_percent"] == pytest.approx(100 * (1 - math.exp(-18 * math.log(8) / 42)))
    assert summary["by_position"] == []
    assert len(summary["samples"]) == len(summary["examples"]) == 2
    prefixes = [example["prefix"] for example in summary["examples"]]
    assert prefixes == [sample["prefix"] for sample in summary["samples"]]
    written = summary["written"]
    assert written["names"] == ["human", "base", "energy", "lowest energy of n", "likeliest of n"]
    assert [text["energy"] for text in written["texts"]] == [sample["joint"] for sample in summary["samples"]]
    assert set(written["nearer"]) == set(written["names"][2:])
    assert set(summary["baselines"]["counts"]["against_joint"]) == {"percent", "interval"}
    page = write_report(load_run(done[0]), Silent()).read_text()
    assert "resampling chunk by chunk, m = 3, n = 8" in page
    assert "Nearer to human text than base" in page


def test_rows_in_chunks_are_compared_with_whole_ones_window_by_window(done, whole):
    (found,) = compare_rows([load_run(done[0])], [load_run(whole)], Rng(0)).values()
    ours, theirs = (read_json(folder / "evaluation" / "evaluation.json")["joint"] for folder in (done[0], whole))
    ratio = ours["perplexity"]["certified"] / theirs["perplexity"]["certified"]
    assert found.value == pytest.approx(100 * (1 - ratio))


def test_killed_and_continued_it_has_the_same_bits(done, hashes, tmp_path):
    folder = shutil.copytree(done[0], tmp_path / "run")
    for stage, lost in (("negatives/train", 1), ("candidates", 1), ("evaluation/scores", 2)):
        for path in sorted((folder / stage).glob("*0*.*"))[-lost:]:
            path.unlink()
        (folder / stage.split("/")[0] / "stage.json").unlink()
    (folder / "energy" / "stage.json").unlink()
    for _ in run(load_recipe(str(done[1]), CHUNKED), folder):
        pass
    assert hashes(folder) == hashes(done[0])


def test_it_writes_chunk_by_chunk_up_to_the_continuation(done, call):
    joint = load(done[0])
    assert (joint.space.length, joint.text_length, joint.max_context) == (3, 7, 18)
    texts = joint.sample("The function returns", n=2, candidates=16, seed=4)
    assert [step.x.tokens.shape[-1] for step in texts.steps[:3]] == [3, 3, 1]
    assert all(len(text.tokens) == 7 or text.has_ended for text in texts)
    assert not texts.notes
    status, out, err = call(
        "sample", done[0], "--prefix", "The function returns", "-n", 2, "--candidates", 16, "--seed", 4, "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["length"] == 7
    assert [row["text"] for row in found["results"][0]["texts"]] == [text.text for text in texts]
    server = ModelServer(joint)
    request = server.request("The function returns", sampler=Resampling(candidates=16), num=2, seed=4)
    assert (server.length, request.writing.chunks, request.writing.max_tokens) == (7, 3, 7)
    assert len(joint.sample("The", length=5, candidates=4)[0].tokens) <= 5
    assert len(joint.sample("The", chunks=1, candidates=4)[0].tokens) <= 3


def test_a_saved_model_writes_the_same(done, tmp_path):
    joint = load(done[0])
    joint.save_pretrained(tmp_path / "pair")
    again = type(joint).from_pretrained(tmp_path / "pair")
    wanted, found = (model.sample("The", candidates=8, seed=1)[0].tokens for model in (joint, again))
    assert found == wanted


def test_other_windows_and_candidates(done, tmp_path):
    folder = shutil.copytree(done[0], tmp_path / "run")
    found = evaluate(folder, EvaluationRequest(split="validation", windows=4, candidates=5))
    assert found["joint"]["sampler"] == "resampling chunk by chunk, m = 3, n = 5"
    assert (found["windows"], found["joint"]["windows"]) == (4, 4)
    assert found["base"]["perplexity"]["token"] == pytest.approx(found["joint"]["base_perplexity"])


def test_an_energy_of_several_lengths(finished_run, corpus_file):
    folder, _, results = finished_run(recipe_of(corpus_file), [*CHUNKED, "chunk=[3,5]"])
    windows = open_corpus(load_run(folder)).in_chunks((3, 5)).windows("train")
    assert len(windows) == windows.num_whole * (3 + 2)
    assert results[2].summary["train"]["windows"] == 24
    last = windows.continuations(torch.arange(len(windows) - 2, len(windows)))
    assert last.lengths.flatten().tolist() == [5, 2]
    summary = read_json(folder / "evaluation" / "evaluation.json")
    assert summary["joint"]["sampler"] == "resampling chunk by chunk, m = 3, n = 8"
    assert load(folder).space.length == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["chunk=9"], "chunk is \\[9\\]"),
        (["chunk=[3,3]"], "different numbers"),
        (["chunk=0"], "at least 1"),
        (["chunk=3", "evaluation.position_windows=1"], "position_windows needs whole continuations"),
        (["chunk=[3,5]", "training.lengths=2"], "by one of them"),
    ],
)
def test_what_makes_no_sense_is_refused(corpus_file, tmp_path, changes, words):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_of(corpus_file))
    with pytest.raises(UserError, match=words):
        load_recipe(str(path), [*CHUNKED, *changes])
