"""Runs of the family random-field: made, resumed, measured, reported, loaded, sampled; and what they refuse."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from freenergy import Rng, UserError, load, load_run, run
from freenergy.cli import app
from freenergy.core.files import read_json
from freenergy.core.progress import SILENT
from freenergy.core.sentences import Sentences
from freenergy.corpus import Corpus
from freenergy.evaluation.fields import score_field
from freenergy.noise.pool import draw_pool
from freenergy.recipes.load import make_recipe
from freenergy.recipes.stages.field_fit import load_field, sentences
from freenergy.report import write_report

CLI = CliRunner()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences in which a verb agrees with a noun three words before it: a bigram model does not know that."""
    generator = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("field")
    for split, num in (("train", 1500), ("validation", 200), ("test", 200)):
        lines = []
        for _ in range(num):
            noun, verb = [("dog", "barks"), ("cats", "sleep"), ("birds", "sing")][generator.integers(3)]
            middle = " ".join(generator.choice(["very", "old", "young", "grey"], size=generator.integers(1, 4)))
            lines.append(f"the {noun} that is {middle} {verb}")
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def table(text, **more):
    return {
        "name": "tiny-field",
        "family": "random-field",
        "corpus": {
            **{split: str(text / f"{split}.txt") for split in ("train", "validation", "test")},
            "documents": "line", "prefix": 0, "continuation": 32, "ending": "eos", "deduplicate": 0,
        },
        "tokenizer": {"kind": "words"},
        "base": {"kind": "ngram", "order": 2},
        "features": {"types": ["w", "ws", "wsh", "c", "tied", "len"], "cutoff": 2, "classes": 6},
        "training": {"noise_ratio": 2, "validation_draws": 2000, "fit": {"l2": [1e-2, 1e-3], "iterations": 30}},
        "rivals": [{"kind": "ngram", "order": 5}],
        "evaluation": {"draws": 5000, "samples": 2},
        **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "field"
    list(run(make_recipe(table(text)), out))
    return out


def test_the_field_learns_what_its_base_cannot(folder):
    found = read_json(folder / "evaluation" / "evaluation.json")
    field = found["field"]
    # noun and verb agree by chance one time in three: log 3 nats per sentence are to be had
    assert field["gain"]["global"][1] > 0.5
    assert field["gain"]["by length"][1] > 0.5
    assert field["by length"]["certified"][0] < field["base"][0]
    assert field["global"]["lower"][0] <= field["global"]["certified"][0] + 0.05
    assert [each["name"] for each in found["rivals"]] == ["5-gram"]
    assert sum(found["lengths"]["joint"]) == pytest.approx(1)
    tried = read_json(folder / "field" / "stage.json")["summary"]["tried"]
    assert all(0 < each["ess"] <= each["draws"] == 2000 for each in tried)


def test_what_was_measured_is_what_the_parts_say(folder):
    """The numbers of the run again, from the loaded field and a pool of the same name."""
    this = load_run(folder)
    corpus = Corpus.open(folder / "corpus")
    field, law = load_field(this, corpus)
    test = sentences(corpus, "test", field.longest)
    pool = draw_pool(field.base, field.longest, 5000, Rng(0).child("evaluation").child("pool"))
    found = score_field(field, test, pool)
    gain = found.sums.certified(found.potential, test.lengths, law).mean()
    assert gain == pytest.approx(read_json(folder / "evaluation" / "evaluation.json")["field"]["gain"]["by length"][0])


def test_a_pool_that_trained_the_field_is_refused(folder):
    corpus = Corpus.open(folder / "corpus")
    field, _ = load_field(load_run(folder), corpus)
    train = sentences(corpus, "train")
    used = draw_pool(field.base, field.longest, 2 * train.num, Rng(0).child("field").child("noise"))
    with pytest.raises(UserError, match="trained the field"):
        score_field(field, train, used)
    score_field(field, train, draw_pool(field.base, field.longest, 100, Rng(9)))


def test_it_loads_as_a_residual_model_and_is_saved(folder, tmp_path):
    model = load(folder)
    ranking = model.score("", ["the dog that is old barks", "the dog that is old sing"], ends=True)
    right, wrong = ranking.candidates
    assert right.energy < wrong.energy - 1
    with pytest.raises(UserError, match="no candidate is acceptable"):
        model.score("", ["the dog"])  # does not end there, so it is no sentence
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    x = Sentences.from_lists([[3, 4, model.base.eos]]).continuations()
    assert again.log_score(x).equal(model.log_score(x))


def test_commands_show_measure_and_sample_it(folder):
    shown = CLI.invoke(app, ["evaluate", str(folder), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["field"]["sentences"] == 200
    other = CLI.invoke(app, ["evaluate", str(folder), "--split", "validation", "--candidates", "1001", "--json"])
    assert json.loads(other.stdout)["field"]["log Z"]["draws"] == 1000
    again = CLI.invoke(app, ["evaluate", str(folder)])
    assert "certified" in again.stdout
    written = CLI.invoke(app, ["sample", str(folder), "-n", "2", "--candidates", "16", "--json"])
    assert written.exit_code == 0, written.output
    refused = CLI.invoke(app, ["evaluate", str(folder), "--windows", "3"])
    assert refused.exit_code != 0


def test_the_report_is_a_page_with_every_table(folder):
    page = write_report(load_run(folder), SILENT).read_text()
    for words in ("certified", "Penalties", "5-gram", "Lengths of sentences", "wang2018trf", "freenergy run"):
        assert words in page


def test_a_killed_fit_resumes_with_the_same_bits(text, folder, tmp_path):
    """A run whose first penalty is done continues with the second, to the same weights."""
    list(run(make_recipe(table(text)), tmp_path / "a", stage="base"))
    source, target = folder / "field", tmp_path / "a" / "field"
    (target / "penalties").mkdir(parents=True)
    (target / "begun.json").write_bytes((source / "begun.json").read_bytes())
    name = "penalty-0.01.safetensors"
    (target / "penalties" / name).write_bytes((source / "penalties" / name).read_bytes())
    list(run(make_recipe(table(text)), tmp_path / "a", stage="field"))
    weights = "model/energy.safetensors"
    assert (target / weights).read_bytes() == (source / weights).read_bytes()


def test_a_field_of_pairs_is_exact_and_its_estimates_agree(text, tmp_path):
    recipe = table(text, form="pairs", rivals=[], training={"fit": {"l2": [1e-3], "iterations": 10}})
    list(run(make_recipe(recipe), tmp_path / "pairs"))
    found = read_json(tmp_path / "pairs" / "evaluation" / "evaluation.json")
    exact, estimates = found["exact"]["perplexity"][0], found["estimates"]
    assert exact < found["exact"]["base"][0]
    assert [each["draws"] for each in estimates] == [50, 500, 5000]
    assert estimates[-1]["perplexity"][0] == pytest.approx(exact, rel=0.02)
    assert estimates[-1]["certified"][0] == pytest.approx(exact, rel=0.02)
    assert "field of pairs" in write_report(load_run(tmp_path / "pairs"), SILENT).read_text()
    with pytest.raises(UserError, match="is absolute"):
        load(tmp_path / "pairs")


@pytest.mark.parametrize("parts", ["head", "stages", "joint"])
def test_a_network_learns_alone_after_the_features_or_with_them(text, folder, tmp_path, parts):
    recipe = table(text, head={"head": "hidden", "encoder": "blstm", "width": 16}, rivals=[])
    steps = {"steps": 150, "learning_rate": 1e-2, "warmup": 10, "weight_decay": 0.0, "validate_every": 50}
    recipe["training"]["network"] = {"parts": parts, "optimisation": {"batch_size": 64, **steps}}
    list(run(make_recipe(recipe), tmp_path / "run"))
    found = read_json(tmp_path / "run" / "evaluation" / "evaluation.json")["field"]
    assert found["gain"]["by length"][1] > 0.4
    if parts == "stages":  # the network only adds to the features that ``folder`` has too
        alone = read_json(folder / "evaluation" / "evaluation.json")["field"]["gain"]["by length"][0]
        assert found["gain"]["by length"][0] > alone - 0.05
    curve = read_json(tmp_path / "run" / "field" / "stage.json")["summary"]["curve"]
    assert [each["step"] for each in curve] == [50, 100, 150]
    model = load(tmp_path / "run")
    right, wrong = model.score("", ["the dog that is old barks", "the dog that is old sing"], ends=True).candidates
    assert right.energy < wrong.energy - 1
    page = write_report(load_run(tmp_path / "run"), SILENT).read_text()
    assert "Training of the network" in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus": {"prefix": 3}}, "law of whole sentences"),
        ({"corpus": {"ending": "fixed"}}, "law of whole sentences"),
        ({"features": {"types": ["x"]}}, "choose from w, c"),
        ({"training": {"fit": {"l2": []}}}, "one penalty or more"),
        ({"training": {"noise_ratio": 0}}, "noise_ratio"),
        ({"base": {"kind": "ngram", "local": {"order": 3}}}, "base.local"),
        ({"rivals": [{"kind": "ngram", "order": 3}, {"kind": "ngram", "order": 3}]}, "two rivals"),
        ({"evaluation": {"draws": 3}}, "draws"),
        ({"form": "pairs", "head": {"width": 8}}, "a network is not"),
        ({"head": {"width": 7}}, "even width"),
        ({"form": "pairs", "base": {"kind": "ngram", "order": 3}}, "starts at zero does not learn"),
    ],
)
def test_wrong_recipes_are_refused(text, change, words):
    wrong = table(text)
    for key, value in change.items():
        wrong[key] = {**wrong.get(key, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=words):
        make_recipe(wrong)


def test_a_held_out_sentence_longer_than_the_field_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="have more than 5 words"):
        list(run(make_recipe(table(text, longest=5)), tmp_path / "short"))
