"""Runs over a base that only samples: every command works, no perplexity is claimed, bad recipes are one sentence."""

import json
import math
import shutil

import pytest
import torch
from typer.testing import CliRunner

import freenergy
from freenergy import EvaluationRequest, UserError, evaluate, load, run
from freenergy.cli import app
from freenergy.core.files import file_hash, read_json, read_tensors
from freenergy.lm.sources.trust import SWITCH
from freenergy.partition import certified_gain
from freenergy.recipes.load import make_recipe

WORDS = ("red", "green", "blue", "small", "large", "old", "new")
NOUNS = ("house", "river", "tree", "road", "hill")


def real(i):
    """A sentence as the corpus has it: the colour comes before the size, and the noun last."""
    return f"the {WORDS[i % 3]} {WORDS[3 + i % 4]} {NOUNS[i % 5]} stands by the {NOUNS[(i * 3 + 1) % 5]}"


def write(prefix, seed):
    """The same words in any order: a writer without probabilities."""
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed)).tolist()
    words = real(seed).split()
    return " ".join(words[i % len(words)] for i in order[: 3 + seed % 5])


@pytest.fixture(scope="module", autouse=True)
def trusted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(real(i) for i in range(300)))
    rows = [{"text": write("", seed)} for seed in range(400)]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def table(**changes):
        found = {
            "name": "box",
            "corpus": {
                "source": str(folder / "text.txt"), "documents": "line", "prefix": 0, "continuation": 8,
                "stride": 1000000, "ending": "eos", "deduplicate": 0, "validation_share": 0.2, "test_share": 0.2,
            },
            "tokenizer": {"kind": "words"},
            "base": {"kind": "samples", "source": {"kind": "pool", "path": str(folder / "pool.jsonl")}},
            "negatives": {"windows": 40, "per_prefix": 4, "validation_windows": 12, "validation_per_prefix": 7},
            "energy": {"kind": "ngram", "order": 2, "lexicon": 4},
            "evaluation": {"windows": 12, "candidates": 16, "certified_windows": 10, "samples": 2},
        }  # fmt: skip
        for section, values in changes.items():
            found[section] = {**found[section], **values} if isinstance(found.get(section), dict) else values
        return found

    return table


@pytest.fixture(scope="module")
def done(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "box"
    return folder, {result.name: result.summary for result in run(make_recipe(table()), folder)}


def command(*words):
    found = CliRunner().invoke(app, list(map(str, words)))
    assert found.exit_code == 0, found.output
    return found.stdout


def test_a_run_certifies_nats_per_text_and_no_perplexity(done):
    folder, found = done
    evaluation = found["evaluation"]
    joint, gain = evaluation["joint"], evaluation["joint"]["gain"]
    assert not evaluation["has_log_prob"]
    assert 0 < gain["nats_interval"][0] < gain["nats_per_sequence"] <= gain["ceiling_nats"] == math.log(16)
    parts = [read_tensors(path) for path in sorted((folder / "evaluation" / "scores").glob("*.safetensors"))]
    energy = torch.cat([part["energy"] for part in parts])
    own = certified_gain(energy[:, 0], energy[:, 1:])
    assert gain["nats_per_sequence"] == pytest.approx(own.mean().item(), abs=1e-12)
    assert evaluation["draws_curve"][-1]["certified"] == pytest.approx(own.mean().item(), abs=1e-9)
    claimed = [evaluation["base"]["perplexity"], joint["perplexity"], joint["per_word"], joint["per_byte"]]
    assert {value for by in claimed for value in by.values()} == {None}
    assert gain["percent"] is gain["ceiling_percent"] is joint["base_perplexity"] is None
    assert "densities" not in evaluation
    assert {sample["log_base"] for sample in evaluation["samples"]} == {None}
    this = freenergy.load_run(folder)
    assert this.recipe.numbers(this) == [("certified nats per text", gain["nats_per_sequence"])]


def test_no_text_of_the_pool_is_learned_from_and_measured_on(done, table):
    """The draws on disk of one split are of its own part of the pool."""
    folder, _ = done
    rows = [json.loads(line) for line in (folder / "base" / "pool.jsonl").read_text().splitlines()]
    assert {row["split"]: len(row["texts"]) for row in rows} == {"train": 200, "validation": 80, "test": 120}


def test_the_commands(done, tmp_path):
    folder, found = done
    shown = command("evaluate", folder)
    assert "certified nats per text (perplexity is not claimed)" in " ".join(shown.split())
    assert json.loads(command("evaluate", folder, "--json"))["joint"] == found["evaluation"]["joint"]
    texts = json.loads(command("sample", folder, "--num", 3, "--candidates", 20, "--json"))["results"][0]["texts"]
    assert len(texts) == 3
    assert {text["log_base"] for text in texts} == {None}
    lists = tmp_path / "lists.jsonl"
    lists.write_text(json.dumps({"prefix": "", "candidates": [write("", 5), real(77)]}) + "\n")
    ranked = json.loads(command("score", folder, lists, "--ends", "--json"))
    assert ranked["lists"][0]["best"] == real(77)
    page = (folder / "report.html").read_text() if (folder / "report.html").is_file() else ""
    page = page or (command("report", folder) and (folder / "report.html").read_text())
    assert "certified nats per text (perplexity is not claimed)" in page
    assert "certified perplexity" not in page


def test_another_evaluation_and_a_pool_that_is_too_small(done):
    folder, _ = done
    more = evaluate(folder, EvaluationRequest(windows=6, candidates=32))
    assert more["joint"]["gain"]["ceiling_nats"] == math.log(32)
    with pytest.raises(UserError, match=r"has 120 test texts .* candidate 121 was asked for: add texts, or lower"):
        evaluate(folder, EvaluationRequest(windows=2, candidates=200))


def test_a_killed_stage_resumes_with_the_same_bits(done, table, tmp_path):
    """Without its last shards the run draws what is missing, and ends with the same files."""
    folder = shutil.copytree(done[0], tmp_path / "run")
    before = {path: file_hash(path) for path in sorted((folder / "candidates").glob("*.parquet"))}
    for path in list(before)[1:]:
        path.unlink()
    for name in ("candidates", "evaluation"):
        (folder / name / "stage.json").unlink()
    results = {result.name: result for result in run(make_recipe(table()), folder)}
    assert results["energy"].was_cached
    assert not results["candidates"].was_cached
    assert {path: file_hash(path) for path in before} == before
    own = read_json(done[0] / "evaluation" / "evaluation.json")
    assert read_json(folder / "evaluation" / "evaluation.json") == own


def test_the_residual_model_is_saved_with_its_pool(done, tmp_path):
    joint = load(done[0])
    joint.save_pretrained(tmp_path / "pair")
    again = freenergy.ResidualModel.from_pretrained(tmp_path / "pair")
    first, second = (str(model.sample("", n=2, candidates=20, seed=3)) for model in (joint, again))
    assert first == second


def test_a_function_is_a_base_and_a_change_of_its_file_a_change_of_the_run(table, tmp_path, monkeypatch):
    """The key of the base has the hash of the function's file; a prompt is the prefix of a window."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_writer.py"
    module.write_text("def write(prefix, seed):\n    return 'small house' if seed % 2 else prefix\n")
    changes = {
        "base": {"source": {"kind": "function", "function": "my_writer:write"}},
        "corpus": {"prefix": 2, "stride": 4},
    }
    recipe = make_recipe(table(**changes))
    results = {result.name: result for result in run(recipe, tmp_path / "run", stage="base")}
    assert results["base"].summary["source"] == "function"
    assert {result.was_cached for result in run(recipe, tmp_path / "run", stage="base")} == {True}
    module.write_text("def write(prefix, seed):\n    return 'large house'\n")
    assert not list(run(recipe, tmp_path / "run", stage="base"))[-1].was_cached


def test_a_box_is_certified_chunk_by_chunk_beyond_log_n(table, tmp_path, monkeypatch):
    """Chunks are texts of the box after the true past, cut; the ceiling is log n for each of them."""
    monkeypatch.syspath_prepend(tmp_path)
    words = "'red old tree by the'.split()[seed % 5 :]"
    (tmp_path / "my_chunks.py").write_text(f"def write(prefix, seed):\n    return ' '.join({words})\n")
    changes = {
        "base": {"source": {"kind": "function", "function": "my_chunks:write"}},
        "corpus": {"prefix": 1, "stride": 20},
        "energy": {"kind": "product", "parts": [{"kind": "ngram", "order": 2, "lexicon": 4}, {"kind": "repetition"}]},
    }
    recipe = make_recipe({**table(**changes), "energy": changes["energy"], "chunk": 4})
    *_, evaluation = run(recipe, tmp_path / "run")
    joint = evaluation.summary["joint"]
    assert joint["sampler"] == "resampling chunk by chunk, m = 4, n = 16"
    assert joint["gain"]["ceiling_nats"] == pytest.approx(2 * math.log(16))
    assert evaluation.summary["draws_curve"][-1]["certified"] == pytest.approx(joint["gain"]["nats_per_sequence"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"corpus": {"ending": "fixed"}}, r'set corpus\.ending = "eos"'),
        ({"corpus": {"stride": None}}, r"set corpus\.stride = 1000000"),
        ({"energy": None}, r"nothing to measure without an energy: add an \[energy\] section"),
        ({"energy": {"kind": "probe"}}, "an energy of kind 'probe' reads the base's network or predictions"),
        ({"energy": {"kind": "unit"}}, "an energy of kind 'unit' reads"),
        ({"energy": {"kind": "bit"}}, "an energy of kind 'bit' reads"),
        ({"energy": {"kind": "log-ratio"}}, "an energy of kind 'log-ratio' reads"),
        ({"energy": {"kind": "logits"}}, "an energy of kind 'logits' reads"),
        ({"energy": {"kind": "product", "parts": [{"kind": "ngram"}, {"kind": "probe"}]}}, "kind 'probe' reads"),
        ({"negatives": {"sources": [{"kind": "base", "temperature": 0.7}]}}, r"leave negatives\.sources out"),
        ({"baselines": [{"kind": "local", "name": "l"}]}, r"leave \[\[baselines\]\] out"),
        ({"evaluation": {"position_windows": 1}}, r"set evaluation\.position_windows = 0"),
        ({"base": {"source": {"kind": "command", "command": []}}}, "command is empty"),
        ({"base": {"source": {"kind": "function", "function": "write"}}}, "write it as module:function"),
        ({"base": {"source": {"kind": "endpoint", "url": "ftp://x"}}}, "give the server's address"),
        ({"base": {"source": {"kind": "endpoint", "url": "http://me:pw@x/v1"}}}, "FREENERGY_API_KEY"),
        ({"base": {"source": {"path": "p"}}}, "base.source has no kind; choose one of 'command'"),
        ({"base": {"source": {"kind": "oracle"}}}, "base.source"),
    ],
)
def test_a_bad_recipe_is_one_sentence(changes, words, table):
    changed = table(**{key: value for key, value in changes.items() if value is not None and key != "energy"})
    if "energy" in changes:
        changed["energy"] = changes["energy"]
    if changed["energy"] is None:
        del changed["energy"]
    if changes.get("corpus", {}).get("stride", 1) is None:
        del changed["corpus"]["stride"]
    with pytest.raises(UserError, match=words):
        make_recipe(changed)
