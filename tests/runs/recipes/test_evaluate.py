"""``freenergy evaluate``: the run's own numbers, other windows and draws, any text; killed and gone on."""

import json
import math
import shutil

import pytest

from freenergy import UserError, write_report
from freenergy.core.checksums import with_digest, without_digest
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Silent
from freenergy.recipes import load_run
from freenergy.recipes.stages.evaluation import EvaluationRequest, evaluate


@pytest.fixture(scope="module")
def done(joint_run):
    """A finished run, and its recipe."""
    return joint_run


@pytest.fixture
def copy(done, tmp_path):
    """The same run in a folder of this test's own."""
    shutil.copytree(done[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def text(tmp_path):
    """Two documents that no module's documentation holds."""
    path = tmp_path / "text.jsonl"
    rows = ["Call me Ishmael. Some years ago, never mind how long precisely, " * 2, "It was the best of times. " * 6]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_the_object_has_what_was_promised(done, call):
    folder, _ = done
    status, out, err = call("evaluate", folder, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert set(found["base"]["perplexity"]) == set(found["base"]["interval"]) == {"token", "word", "byte"}
    joint = found["joint"]
    for key in ("perplexity", "interval", "per_word", "per_byte"):
        assert set(joint[key]) == {"lower", "upper", "certified"}
    assert {"nats_per_sequence", "percent", "interval", "nats_interval", "ceiling_percent"} == set(joint["gain"])
    assert {"ess", "largest_share", "k_hat", "verdict", "nce_accuracy", "pair_accuracy"} <= set(joint)
    assert (joint["draws"], joint["windows"]) == (7, 6)
    assert [row["draws"] for row in found["draws_curve"]] == [2, 4, 7]
    assert found["draws_curve"][-1]["certified"] == pytest.approx(joint["perplexity"]["certified"])
    assert [row["position"] for row in found["by_position"]] == [1, 2, 3, 4]
    assert set(found["text"]) == {"human", "base", "joint"}
    for told in found["text"].values():
        assert set(told["distinct"]) == set(told["unseen"]) == {"2", "3", "4"}
        assert told["tokens"] == 6 * 4
    assert set(found["densities"]) == {"base", "joint", "difference_of_means"}
    assert len(found["densities"]["joint"]["human"]) == 6
    assert {"prefix", "human", "best", "typical", "worst"} == set(found["examples"][0])
    assert found["examples"][0]["best"]["energy"] <= found["examples"][0]["worst"]["energy"]
    assert {"corpus", "base", "energy", "evaluation"} <= set(found["cost"])
    assert found["cost"]["evaluation"]["cpu_seconds"] > 0
    base, energy = found["ladder"]
    assert (base["perplexity"], energy["perplexity"]) == pytest.approx(
        (joint["base_perplexity"], joint["perplexity"]["certified"])
    )
    assert energy["over_below"]["percent"] == pytest.approx(joint["gain"]["percent"])
    assert energy["cpu_seconds"] > 0
    assert found["ranking"]["energy"]["pairs"][0] == pytest.approx(joint["pair_accuracy"])
    file = read_json(folder / "evaluation" / "evaluation.json")
    timed = {"cost", "baselines", "ladder"}  # what has times in it
    assert {key: value for key, value in found.items() if key not in timed} == {
        key: value for key, value in file.items() if key not in timed
    }


def test_a_baseline_stands_beside_them(done):
    (found,) = evaluate(done[0])["baselines"].values()
    assert found["parameters"] > 0
    assert found["cpu_seconds"] > 0
    base = evaluate(done[0])["base"]["perplexity"]["token"]
    assert found["against_base"]["percent"] == pytest.approx(100 * (1 - found["perplexity"] / base))
    assert {"percent", "interval"} == set(found["against_joint"])
    assert "residual model" in found["verdict"]


def test_the_log_probabilities_add_up(done):
    """What the densities hold gives the perplexity of the base again."""
    found = evaluate(done[0])
    values = found["densities"]["base"]["human"]
    assert found["joint"]["base_perplexity"] == pytest.approx(math.exp(-sum(values) / len(values)))


def test_a_table_for_people(done, call):
    status, out, _ = call("evaluate", done[0])
    assert status == 0
    for words in ("per token", "residual, certified", "residual, lower", "certified gain", "distinct", "human"):
        assert words in " ".join(out.split())


def test_other_windows_and_draws_go_into_a_folder_of_their_own(copy, call):
    before = (copy / "evaluation" / "evaluation.json").read_bytes()
    status, out, err = call("evaluate", copy, "--windows", 4, "--candidates", 5, "--split", "validation", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["split"], found["joint"]["windows"], found["joint"]["draws"]) == ("validation", 4, 4)
    assert found["base"]["perplexity"]["token"] == pytest.approx(found["joint"]["base_perplexity"])
    assert "measured on validation text, which the energy was chosen by" in found["joint"]["verdict"]
    assert (copy / "evaluation" / "evaluation.json").read_bytes() == before
    stamps = {path: path.stat().st_mtime_ns for path in (copy / "evaluations").rglob("*") if path.is_file()}
    again = json.loads(call("evaluate", copy, "--windows", 4, "--candidates", 5, "--split", "validation", "--json")[1])
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in (copy / "evaluations").rglob("*") if path.is_file()} == stamps


def test_the_same_numbers_again_where_the_question_is_the_same(copy):
    """The run's own windows and draws, asked for by number, are the same windows and draws."""
    own = evaluate(copy)
    again = evaluate(copy, EvaluationRequest(windows=6, candidates=8))
    assert again["joint"] == own["joint"]
    assert again["draws_curve"] == own["draws_curve"]


def test_any_text(copy, text, call):
    status, out, err = call("evaluate", copy, "--text", text, "--candidates", 6, "--baselines", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["split"] == "text"
    assert found["baselines"]["counts"]["perplexity"] > 1
    assert found["documents"] == 2
    assert found["joint"]["perplexity"]["certified"] > 1
    assert found["shared_with_training"]["windows"] == 0
    assert "share" not in found["joint"]["verdict"]


def test_text_that_was_trained_on_is_told(copy, call, tmp_path, corpus_file):
    known = tmp_path / "known.jsonl"
    known.write_text("\n".join(corpus_file.read_text().splitlines()[:8]))
    status, out, err = call("evaluate", copy, "--text", known, "--windows", 3, "--candidates", 4, "--json")
    assert status == 0, err
    shared = json.loads(out)["shared_with_training"]
    assert 0 < shared["windows"] <= shared["of"]
    assert f"{shared['windows']} of the text's {shared['of']} windows share" in json.loads(out)["joint"]["verdict"]
    assert "with the training text" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--candidates", "1"], "with 0 draws per window the upper estimate of log Z is undefined"),
        (["--candidates", "2"], "with 1 draw per window the upper estimate of log Z is undefined"),
        (["--windows", "0"], "0 windows were asked for"),
        (["--split", "holdout"], "no split 'holdout'"),
        (["--text", "{short}"], "the longest document has 7 tokens, and a window of this run needs 16"),
        (["--text", "{blank}"], "there is no text in"),
        (["--text", "{gone}"], "there is no file or folder"),
        (["--text", "{short}", "--split", "validation"], "a text has no split 'validation': leave --split out"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(copy, call, tmp_path, options, words):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "blank.txt").write_text(" \n")
    places = {name: tmp_path / f"{name}.txt" for name in ("short", "blank", "gone")}
    before = sorted(path.name for path in copy.iterdir())
    status, out, err = call("evaluate", copy, *(option.format(**places) for option in options))
    assert (status, out) == (2, "")
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("freenergy: ")
    assert words in sentence
    assert "Traceback" not in err
    assert sorted(path.name for path in copy.iterdir()) == before


def test_a_run_without_an_energy_is_told_what_to_do(copy, call):
    table = load_run(copy).recipe.to_json() | {"energy": None}
    write_json(copy / "recipe.json", table)
    status, out, err = call("evaluate", copy)
    assert (status, out) == (2, "")
    assert "has no energy, so there is only its base to measure" in err
    assert "add an [energy] section" in err


def test_baselines_that_are_not_there_are_told(copy):
    write_json(copy / "recipe.json", load_run(copy).recipe.to_json() | {"baselines": []})
    with pytest.raises(UserError, match="has no baselines: leave --baselines out"):
        evaluate(copy, EvaluationRequest(baselines=True))


def test_a_run_that_is_not_finished_is_told(copy):
    (copy / "energy" / "stage.json").unlink()
    with pytest.raises(UserError, match=r"the stage energy of .* is not finished"):
        evaluate(copy)


def test_an_evaluation_that_is_missing_is_done(copy, done):
    (copy / "evaluation" / "stage.json").unlink()
    (copy / "evaluation" / "evaluation.json").unlink()
    scores = sorted((copy / "evaluation" / "scores").iterdir())
    scores[-1].unlink()
    kept = scores[0].stat().st_mtime_ns
    found, before = evaluate(copy), evaluate(done[0])
    assert scores[0].stat().st_mtime_ns == kept
    assert {**found, "cost": None} == {**before, "cost": None}


def test_numbers_of_other_settings_are_not_shown(copy):
    """A recipe that was changed and run up to a stage in between: the old evaluation is not the recipe's."""
    assert write_report(load_run(copy), Silent()).is_file()
    recipe = without_digest(read_json(copy / "recipe.json"), copy / "recipe.json")
    recipe["evaluation"]["windows"] = 2
    write_json(copy / "recipe.json", with_digest(recipe))
    with pytest.raises(UserError, match="evaluated with other settings"):
        write_report(load_run(copy), Silent())
    assert evaluate(copy)["windows"] == 2


@pytest.mark.faults
def test_kill_9_while_a_text_is_evaluated(done, text, tmp_path, begin):
    """Killed while drawing, scoring and stepping; the end is as if nothing had happened."""
    for name in ("whole", "cut"):
        shutil.copytree(done[0], tmp_path / name)

    def start(name):
        return begin("evaluate", tmp_path / name, "--text", text, "--candidates", 40, "--windows", 12, "--json")

    whole = json.loads(start("whole").succeed())
    cut = tmp_path / "cut" / "evaluations"
    for pattern in ("draws-*/shard-00000.parquet", "*/scores/00000.safetensors", "*/positions/00000.safetensors"):
        start("cut").kill_when(lambda p=pattern: any(cut.glob(p)))
        assert not any(cut.glob("*/evaluation.json"))
    assert {**json.loads(start("cut").succeed()), "cost": None} == {**whole, "cost": None}
