"""A run: stages once, exact resume after kill -9, results that can be opened again."""

import json
import shutil

import pytest
import torch

from freenergy import Rng, Sequences, SequenceSpace, UserError, load_base, load_recipe, run
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.corpus.resources import ResourceUnavailable
from freenergy.recipes import load_run

CHANGES = ["base.optimisation.steps=6", "base.optimisation.validate_every=3"]


def test_stages_are_done_once(recipe, tmp_path, hashes):
    out = tmp_path / "out"
    first = list(run(load_recipe(str(recipe), CHANGES), out))
    assert [result.name for result in first] == ["corpus", "base", "evaluation"]
    assert not any(result.was_cached for result in first)
    before = hashes(out)
    again = list(run(load_recipe(str(recipe), CHANGES), out))
    assert all(result.was_cached for result in again)
    assert [result.summary for result in again] == [result.summary for result in first]
    assert hashes(out) == before
    changed = list(run(load_recipe(str(recipe), [*CHANGES, "evaluation.windows=10"]), out))
    assert [result.was_cached for result in changed] == [True, True, False]
    learned = list(run(load_recipe(str(recipe), [*CHANGES, "base.dropout=0.0"]), out))
    assert [result.was_cached for result in learned] == [True, False, False]


def test_the_summary_has_what_a_user_asks_for(recipe, tmp_path):
    corpus, base, evaluation = run(load_recipe(str(recipe), CHANGES), tmp_path / "out")
    assert set(corpus.summary["splits"]) == {"train", "validation", "test"}
    assert corpus.summary["examples"]
    assert base.summary["parameters"] > 1_000_000
    found, interval = (evaluation.summary["base"][key] for key in ("perplexity", "interval"))
    for unit in ("token", "word", "byte"):
        assert 1 <= interval[unit][0] < found[unit] < interval[unit][1]
    assert found["byte"] < found["token"] < found["word"]
    assert "joint" not in evaluation.summary
    assert len(evaluation.summary["samples"]) == 2


def test_a_run_can_be_opened_and_written_with(recipe, tmp_path):
    list(run(load_recipe(str(recipe), CHANGES), tmp_path / "out", stage="base"))
    lm, tokenizer = load_base(tmp_path / "out")
    space = SequenceSpace(vocab_size=tokenizer.vocab_size, length=5, eos=tokenizer.eos)
    contexts = Sequences.from_lists([tokenizer.encode("def main")])
    draws = [lm.sample(contexts, 2, space, Rng(3)).x.tokens for _ in range(2)]
    assert torch.equal(*draws)
    assert load_run(tmp_path / "out").recipe == load_recipe(str(recipe), CHANGES)


def test_ngram_and_pretrained_bases(recipe, tmp_path):
    folder = tmp_path / "trained"
    trained = list(run(load_recipe(str(recipe), CHANGES), folder))[1].summary
    text = recipe.read_text()
    head, tail = text.split("[base]")[0], "[evaluation]" + text.split("[evaluation]")[1]
    counted = tmp_path / "counted.toml"
    counted.write_text(f'{head}[base]\nkind = "ngram"\norder = 3\n{tail}')
    results = list(run(load_recipe(str(counted)), tmp_path / "counted"))
    assert results[1].summary["order"] == 3
    assert results[2].summary["base"]["perplexity"]["token"] < 400
    model = folder / "base" / "model"
    found = tmp_path / "found.toml"
    head = head.replace("[tokenizer]\nvocab_size = 400", f'[tokenizer]\nkind = "pretrained"\npath = "{model}"')
    found.write_text(f'{head}[base]\nkind = "pretrained"\npath = "{model}"\n{tail}')
    results = list(run(load_recipe(str(found)), tmp_path / "found"))
    assert results[1].summary["fingerprint"] == trained["fingerprint"]
    mismatched = tmp_path / "mismatched.toml"
    mismatched.write_text(
        f'{text.split("[base]")[0].replace("400", "300")}[base]\nkind = "pretrained"\npath = "{model}"\n{tail}'
    )
    with pytest.raises(UserError, match=r"tokenizer of the corpus .* is not that of the checkpoint"):
        list(run(load_recipe(str(mismatched)), tmp_path / "mismatched"))


def test_fine_tuning_starts_where_the_checkpoint_is(recipe, tmp_path):
    list(run(load_recipe(str(recipe), CHANGES), tmp_path / "first"))
    model = tmp_path / "first" / "base" / "model"
    changes = [f'base.start="{model}"', "base.optimisation.steps=1", "base.optimisation.learning_rate=1e-9"]
    tuned = list(run(load_recipe(str(recipe), changes), tmp_path / "second"))[1].summary
    first = json.loads((tmp_path / "first" / "base" / "stage.json").read_text())["summary"]
    assert tuned["validation_perplexity"] == pytest.approx(first["validation_perplexity"], rel=1e-4)


def test_another_tokenizer_at_the_same_path_is_noticed(recipe, tmp_path):
    first, second = (tmp_path / name for name in ("a", "b"))
    for folder, size in ((first, 300), (second, 350)):
        list(run(load_recipe(str(recipe), [f"tokenizer.vocab_size={size}"]), folder, stage="corpus"))
    tokenizer = tmp_path / "tokenizer"
    text = recipe.read_text().replace("vocab_size = 400", f'kind = "pretrained"\npath = "{tokenizer}"')
    path = tmp_path / "pretrained.toml"
    path.write_text(text)
    for folder, size in ((first, 300), (second, 350)):
        shutil.copytree(folder / "corpus" / "tokenizer", tokenizer, dirs_exist_ok=True)
        (result,) = run(load_recipe(str(path)), tmp_path / "out", stage="corpus")
        assert (result.summary["vocab_size"], result.was_cached) == (size, False)


def test_text_without_spaces_has_no_words_and_still_reports(recipe, tmp_path):
    text = tmp_path / "dna.jsonl"
    letters = ["".join("ACGT"[(i * i + i // 7 + k * i) % 4] for i in range(400)) for k in range(20)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in letters))
    changes = [*CHANGES, f'corpus.source="{text}"', "tokenizer.vocab_size=260", "corpus.deduplicate=0"]
    evaluation = list(run(load_recipe(str(recipe), changes), tmp_path / "out"))[-1]
    assert evaluation.summary["base"]["perplexity"]["word"] is None
    assert evaluation.summary["base"]["perplexity"]["byte"] > 1


def test_a_resource_is_no_split(recipe, tmp_path):
    text = recipe.read_text().replace(
        "[tokenizer]", 'train = "wikitext-2"\nvalidation = "wikitext-2"\ntest = "x"\n[tokenizer]'
    )
    path = tmp_path / "leak.toml"
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("source")))
    with pytest.raises(UserError, match=r"has splits of its own: set corpus\.source"):
        list(run(load_recipe(str(path)), tmp_path / "out"))


def test_two_runs_in_one_folder_are_refused(recipe, tmp_path):
    loaded = load_recipe(str(recipe), CHANGES)
    going = run(loaded, tmp_path / "out")
    next(going)
    with pytest.raises(UserError, match="another process is running in"):
        list(run(loaded, tmp_path / "out"))
    going.close()


def test_where_no_route_answers_the_demo_reads_docstrings(tmp_path, monkeypatch):
    """The fallback is said, and is real text of the installed packages."""

    def unavailable(name, progress):
        raise ResourceUnavailable(f"{name} cannot be had: no route answers")

    said = []

    class Listener:
        track = Silent.track

        def say(self, message):
            said.append(message)

    monkeypatch.setattr("freenergy.recipes.stages.corpus.fetch", unavailable)
    (corpus,) = run(load_recipe("demo-tiny"), tmp_path, stage="corpus", progress=Listener())
    assert corpus.summary["text"] == "docstrings of the installed packages"
    assert corpus.summary["splits"]["train"]["tokens"] > 500_000
    assert "no route answers; reading the docstrings" in said[0]
    with pytest.raises(ResourceUnavailable):
        list(run(load_recipe("demo-tiny", ['corpus.fallback=""']), tmp_path / "other", stage="corpus"))


def test_kill_9_in_corpus_and_base_ends_with_the_same_bits(recipe, tmp_path, hashes, begin):
    """Killed once in the corpus stage and at three places of training; the folder ends as if nothing had happened."""
    cut = tmp_path / "cut"
    begin("run", recipe, "--out", tmp_path / "whole").succeed()
    begin("run", recipe, "--out", cut).kill_when((cut / "corpus" / "tokenizer").exists)
    assert not (cut / "corpus" / "stage.json").exists()
    metrics = cut / "base" / "training" / "metrics.jsonl"
    for steps in (1, 12, 25):
        begin("run", recipe, "--out", cut).kill_when(
            lambda s=steps: metrics.exists() and metrics.read_bytes().count(b"\n") >= s
        )
        assert not (cut / "base" / "stage.json").exists()
    begin("run", recipe, "--out", cut).succeed()
    assert file_hash(cut / "base" / "model" / "model.safetensors") == file_hash(
        tmp_path / "whole" / "base" / "model" / "model.safetensors"
    )
    assert hashes(cut) == hashes(tmp_path / "whole")
