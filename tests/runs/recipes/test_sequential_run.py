"""A run with ``[evaluation.sequential]``: particles are certified on the windows of resampling, and resume."""

import math
import shutil

import pytest

from freenergy import UserError, load_recipe, run, write_report
from freenergy.core.files import read_json, read_tensors
from freenergy.core.progress import Silent
from freenergy.recipes import load_run
from freenergy.testing.runs import tiny_run

PARTICLES = [
    "evaluation.position_windows=0",
    "evaluation.sequential.particles=8",
    "evaluation.sequential.check_every=2",
]


def recipe_of(corpus_file):
    return tiny_run(corpus_file, base="counts", energy="ngram")


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    """A finished run with particles, and its recipe."""
    return finished_run(recipe_of(corpus_file), PARTICLES)[:2]


def test_the_certificate_is_the_mean_of_its_runs(done, call):
    summary = read_json(done[0] / "evaluation" / "evaluation.json")
    found, parts = summary["sequential"], sorted((done[0] / "evaluation" / "sequential").iterdir())
    assert len(parts) == summary["joint"]["windows"] == 6
    log_prob = sum(float(read_tensors(path)["log_prob"]) for path in parts)
    assert found["perplexity"] == pytest.approx(math.exp(-log_prob / 24))
    ratio = found["perplexity"] / summary["joint"]["base_perplexity"]
    assert found["gain"]["percent"] == pytest.approx(100 * (1 - ratio))
    assert found["gain"]["ceiling_percent"] == pytest.approx(100 * (1 - math.exp(-2 * math.log(8) / 4)))
    beyond = found["perplexity"] / summary["joint"]["perplexity"]["certified"]
    assert found["beyond_resampling"]["percent"] == pytest.approx(100 * (1 - beyond))
    assert found["sampler"].startswith("sequential Monte Carlo, N = 8, a look every 2 tokens")
    assert "sequential Monte Carlo, N = 8" in write_report(load_run(done[0]), Silent()).read_text()
    status, out, _ = call("evaluate", done[0])
    assert status == 0
    assert "sequential" in out


def test_what_was_certified_before_a_crash_is_kept(done, hashes, tmp_path):
    folder = shutil.copytree(done[0], tmp_path / "run")
    for lost in sorted((folder / "evaluation" / "sequential").iterdir())[3:]:
        lost.unlink()
    (folder / "evaluation" / "stage.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in (folder / "evaluation" / "sequential").iterdir()}
    for _ in run(load_recipe(str(done[1]), PARTICLES), folder):
        pass
    assert hashes(folder) == hashes(done[0])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_chunks_are_summed(finished_run, corpus_file):
    changes = [*PARTICLES, "corpus.continuation=7", "chunk=3"]
    folder = finished_run(recipe_of(corpus_file), changes)[0]
    found = read_json(folder / "evaluation" / "evaluation.json")["sequential"]
    assert found["sampler"].startswith("sequential Monte Carlo chunk by chunk, m = 3, N = 8")
    parts = list((folder / "evaluation" / "sequential").iterdir())
    assert len(parts) == 6 * 3
    log_prob = sum(float(read_tensors(path)["log_prob"]) for path in parts)
    assert found["perplexity"] == pytest.approx(math.exp(-log_prob / 42))
    looks = 2 + 2 + 1  # of chunks of 3, 3 and 1 tokens, every 2
    assert found["gain"]["ceiling_percent"] == pytest.approx(100 * (1 - math.exp(-looks * math.log(8) / 7)))


def test_a_truncated_proposal_is_refused(corpus_file, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_of(corpus_file))
    with pytest.raises(UserError, match="nothing can be certified"):
        load_recipe(str(path), [*PARTICLES, "evaluation.sequential.truncation.top_k=3"])
