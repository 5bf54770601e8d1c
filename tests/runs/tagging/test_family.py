"""The family tagging as a run: every kind of tagger, resumed, measured, reported, loaded, used."""

import json

import pytest
import torch
from typer.testing import CliRunner

from freenergy import Rng, Sentence, Tagger, UserError, load, run
from freenergy.cli import app
from freenergy.recipes.load import make_experiment, make_recipe
from freenergy.runs.sweep.run import run_sweep
from tagged_world import SMALL

KINDS = {
    "features": {"kind": "features", "iterations": 20},
    "features with L1": {
        "kind": "features",
        "templates": ["w[0]", "c0[0]", "suffix2[-1]"],
        "l1": 0.5,
        "iterations": 15,
    },
    "hmm": {"kind": "hmm"},
    "softmax": SMALL | {"law": "softmax"},
    "crf": SMALL | {"law": "crf", "constrained": True},
    "memm": SMALL | {"law": "memm", "characters": "ngrams"},
    "rnnt": SMALL | {"law": "rnnt"},
    "transducer": SMALL | {"law": "transducer"},
    "transducer, design 2": SMALL | {"law": "transducer", "design": 2},
    "transducer by NCE": SMALL | {"law": "transducer", "loss": {"kind": "nce"}},
    "crf by risk": SMALL | {"law": "crf", "loss": {"kind": "risk", "cost": "spans", "k": 3}},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_learns_the_tiny_world(name, table, tmp_path):
    table["tagger"] = KINDS[name]
    summaries = {each.name: each.summary for each in run(make_recipe(table), tmp_path)}
    found = dict(summaries["evaluation"]["rates"])
    assert found["F1 %"][0] > 95, name
    assert summaries["evaluation"]["nats_are_exact"] == (not name.startswith("transducer"))
    assert all(each.was_cached for each in run(make_recipe(table), tmp_path))
    tagger = load(tmp_path)
    assert isinstance(tagger, Tagger)
    one = Sentence(("Grace", "Hopper", "sees", "Rome", "."), columns=(("NNP",), ("NNP",), ("VBZ",), ("NNP",), (".",)))
    assert tagger.tag([one]) == [["B-PER", "I-PER", "O", "B-LOC", "O"]]
    (p,) = tagger.marginals([one])
    assert torch.allclose(p.sum(1), torch.ones(5, dtype=p.dtype), atol=1e-5)
    drawn = tagger.sample([one], 3, Rng(0))
    assert [len(each) for each in drawn[0]] == [5, 5, 5]
    (scored,) = tagger.score([one.tagged(("B-PER", "I-PER", "O", "B-LOC", "O"))])
    assert scored.log_prob <= 1e-6


def test_a_killed_training_ends_with_the_same_bits(table, tmp_path, monkeypatch):
    table["tagger"] = SMALL
    recipe = make_recipe(table)
    list(run(recipe, tmp_path / "whole"))
    from freenergy.tagging.task import TaggingTask

    loss, calls = TaggingTask.loss, []

    def killed(self, step, micro, rng):
        calls.append(step)
        if step == 17:
            raise KeyboardInterrupt
        return loss(self, step, micro, rng)

    monkeypatch.setattr(TaggingTask, "loss", killed)
    with pytest.raises(KeyboardInterrupt):
        list(run(recipe, tmp_path / "killed"))
    monkeypatch.setattr(TaggingTask, "loss", lambda self, *rest: calls.append(rest[0]) or loss(self, *rest))
    list(run(recipe, tmp_path / "killed"))
    assert calls[17:] == list(range(11, 31))  # from the checkpoint at step 10
    a, b = ((tmp_path / name / "tagger" / "weights.safetensors").read_bytes() for name in ("whole", "killed"))
    assert a == b


def test_partial_labels_teach_a_chain(table, world, tmp_path):
    """Half of the training tags are hidden, some are known up to two: the marginal likelihood still learns."""
    lines, rng = [], Rng(7)
    for line in (world / "train.txt").read_text().splitlines():
        word, *rest = line.split() or [""]
        u = rng.uniform(1).item()
        if word and u < 0.4:
            rest[-1] = "_"
        elif word and u < 0.5:
            rest[-1] = "B-PER|B-LOC" if rest[-1].startswith("B") else rest[-1]
        lines.append(" ".join([word, *rest]).strip())
    (tmp_path / "partial.txt").write_text("\n".join(lines) + "\n")
    table["data"] |= {"train": str(tmp_path / "partial.txt"), "partial": True, "scheme": "bio"}
    for tagger in (SMALL, {"kind": "features", "iterations": 20}):
        table["tagger"] = tagger
        summary = list(run(make_recipe(table), tmp_path / "run"))[-1].summary
        assert dict(summary["rates"])["F1 %"][0] > 90
    for tagger, words in (({"kind": "hmm"}, "whole taggings"), (SMALL | {"law": "rnnt"}, "exact sum")):
        table["tagger"] = tagger
        with pytest.raises(UserError, match=words):
            list(run(make_recipe(table), tmp_path / "refused"))


def test_commands(table, world, tmp_path):
    recipe = tmp_path / "tiny.toml"
    data = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table["data"].items())
    recipe.write_text(f'family = "tagging"\n[data]\n{data}\n[tagger]\nkind = "features"\niterations = 15\n')
    folder = str(tmp_path / "run")
    call = CliRunner().invoke
    done = call(app, ["run", str(recipe), "--out", folder], catch_exceptions=False)
    assert done.exit_code == 0
    assert "freenergy tag" in done.stdout
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Probabilities over text" in page
    assert (tmp_path / "run" / "figures" / "transitions.svg").is_file()
    found = json.loads(call(app, ["evaluate", folder, "--json"], catch_exceptions=False).stdout)
    other = json.loads(call(app, ["evaluate", folder, "--text", str(world / "test.txt"), "--json"]).stdout)
    assert found["rates"] == other["rates"]
    assert "lafferty2001crf" in call(app, ["cite", folder]).stdout
    assert call(app, ["verify", folder]).exit_code == 0
    out = tmp_path / "tagged.txt"
    call(app, ["tag", folder, str(world / "test.txt"), "--out", str(out)], catch_exceptions=False)
    assert len(out.read_text().split("\n\n")[0].split("\n")[0].split()) == 4
    scored = call(app, ["tag", folder, str(world / "test.txt"), "--score", "--marginals", "-n", "2", "--json"]).stdout
    row = json.loads(scored)["sentences"][0]
    assert row["log_prob"] <= 0
    assert len(row["samples"]) == 2
    assert 0 < min(row["probabilities"]) <= 1
    assert "tag" in str(call(app, ["tag", folder, "--text", "a b"]).exception)  # it reads a column


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"train": "nowhere.txt"}}, "there is no file"),
        ({"tagger": {"kind": "features", "templates": ["w{0}"]}}, "cannot be read"),
        ({"tagger": {"kind": "neural", "words": 0, "characters": "none"}}, "reads nothing"),
        ({"tagger": {"kind": "neural", "law": "rnnt", "loss": {"kind": "nce"}}}, "nothing to estimate"),
        ({"tagger": SMALL | {"optimisation": {"batch_size": 500}}}, "batch_size lower"),
        ({"data": {"columns": [0], "tag": 1}, "tagger": {"kind": "features", "templates": ["c1[0]"]}}, "lack"),
    ],
)
def test_wrong_settings_are_refused(change, words, table, tmp_path):
    for section, values in change.items():
        table[section] = (table[section] | values) if section == "data" else values
    with pytest.raises(UserError, match=words):
        list(run(make_recipe(table), tmp_path))


def test_a_sweep_compares_taggers_on_the_same_sentences(table, tmp_path):
    table.pop("name")
    experiment = make_experiment({
        "name": "tiny", "seeds": [0, 1], "recipe": {**table, "tagger": {"kind": "hmm"}},
"rows": [{"name": "rare", "set": {"tagger": {"rare": 5}}}],
    })  # fmt: skip
    found = run_sweep(experiment, tmp_path)
    assert [row["name"] for row in found["rows"]] == ["base", "rare"]
    names = [name for name, _ in found["comparisons"][0]["on_test"]]
    assert names[0] == "F1 % or accuracy %"
    assert "p F1 %" in names
