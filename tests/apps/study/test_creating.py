"""Making the texts: windows that do not overlap, tidy texts, and a study that goes on after a kill."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from freenergy import Truncation, UserError, load_recipe, run
from freenergy.apps.study import Making, Study, StudySettings, create, creating
from freenergy.apps.study.creating import apart, tidy
from freenergy.cli.study import study_app
from freenergy.corpus import Corpus

RECIPE = """
name = "tiny"
[corpus]
source = "{text}"
prefix = 6
continuation = 5
validation_share = 0.2
test_share = 0.4
[tokenizer]
vocab_size = 300
[base]
kind = "ngram"
order = 2
[negatives]
per_prefix = 3
windows = 16
validation_windows = 8
validation_per_prefix = 3
[energy]
kind = "ngram"
order = 2
[evaluation]
windows = 8
certified_windows = 4
candidates = 4
samples = 1
"""
TEXT = "the river ran past a mill and over stones until it came to sea where boats lay still at noon"
WORDS = TEXT.split()
SMALL = StudySettings(prefixes=4, checks=2, qualification=3, seed=5)
QUICK = Making(a="base", b="joint", candidates=4)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=15, unique=True), st.integers(1, 9), st.integers(1, 6))
def test_windows_do_not_overlap(starts, width, num):
    order = np.argsort([hash((start, width)) for start in starts])
    rows = apart(np.array(starts), order, width, num)
    taken = sorted(starts[row] for row in rows)
    assert all(b - a >= width for a, b in pairwise(taken))
    if len(rows) < num:  # nothing else would fit
        assert all(min(abs(start - other) for other in taken) < width for start in starts)
    assert rows == [row for row in order.tolist() if row in rows]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A run with an energy whose base counts bigrams."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(WORDS, 60)) for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "recipe.toml").write_text(RECIPE.format(text=folder / "text.jsonl"))
    for _ in run(load_recipe(str(folder / "recipe.toml"), []), folder / "run", stage="energy"):
        pass
    return folder / "run"


def test_the_pairs_of_a_run(tiny, tmp_path):
    study = create(tiny, tiny, tmp_path / "study", SMALL, QUICK)
    assert [item.kind for item in study.items] == ["pair"] * 4 + ["check"] * 2 + ["qualification"] * 3
    assert len({item.prefix for item in study.items}) == 9
    assert [study.models[side]["name"] for side in "ab"] == ["run (base)", "run (joint)"]
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    assert record["versions"].keys() >= {"freenergy", "torch", "python"}
    corpus = Corpus.open(tiny / "corpus")
    text = corpus.tokenizer.decode(corpus.stream("test").tolist())
    for item in study.items:
        assert item.prefix in text
        if item.kind != "pair":
            assert item.prefix + item.b in text, "the right answer is real text"
    again = create(tiny, tiny, tmp_path / "again", SMALL, QUICK)
    assert again.items == study.items
    assert create(tiny, tiny, tmp_path / "study", SMALL, QUICK) == study  # kept


def test_people_against_a_model_on_other_text(tiny, tmp_path):
    rng = np.random.default_rng(1)
    text = "\n\n".join(" ".join(rng.choice(WORDS, 200)) for _ in range(4))
    (tmp_path / "other.txt").write_text(text)
    making = Making(a="joint", candidates=4, length=4, truncation=Truncation(top_k=5), human=(tmp_path / "other.txt",))
    study = create(tiny, "human", tmp_path / "study", StudySettings(prefixes=3, checks=1, qualification=0), making)
    assert study.models["b"]["name"] == "human"
    for item in study.items:
        assert item.prefix + item.b in text
    tokenizer = Corpus.open(tiny / "corpus").tokenizer
    assert {len(tokenizer.encode(item.b)) for item in study.items} == {4}


def test_a_study_that_was_killed_goes_on_with_the_same_bits(tiny, tmp_path, monkeypatch):
    whole = create(tiny, tiny, tmp_path / "whole", SMALL, QUICK)

    class Killed(BaseException):
        pass

    made = []
    real = creating._items

    def stops(*arguments):
        for item in real(*arguments):
            made.append(item.number)
            if len(made) == 6:
                raise Killed
            yield item

    monkeypatch.setattr(creating, "_items", stops)
    with pytest.raises(Killed):
        create(tiny, tiny, tmp_path / "killed", SMALL, QUICK)
    with pytest.raises(UserError, match="is incomplete"):
        Study.open(tmp_path / "killed")
    assert create(tiny, tiny, tmp_path / "killed", SMALL, QUICK).items == whole.items
    assert made == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8], "what was there is not made again"
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["items.jsonl", "study.json"]


def test_bad_questions(tiny, tmp_path):
    def refused(words, *, b=None, settings=SMALL, making=QUICK, out="study"):
        with pytest.raises(UserError, match=words):
            create(tiny, b or tiny, tmp_path / out, settings, making)

    refused("compared with itself", making=Making(candidates=4))
    refused("real text after a prefix has 5 tokens", making=Making(a="base", length=6))
    refused("do not overlap", settings=StudySettings(prefixes=5000))
    refused("is not a run", b=tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    refused("contains other files than a study", out="full")
    create(tiny, tiny, tmp_path / "study", SMALL, QUICK)
    refused("another study", making=Making(a="base", b="joint", candidates=5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"prefixes": 0}, "prefixes is 0"), ({"votes": 0}, "votes is 0"), ({"pass_mark": 1.0}, "pass_mark is 1")],
)
def test_bad_settings(settings, words):
    with pytest.raises(UserError, match=words):
        StudySettings(**settings)


@pytest.mark.parametrize(
    ("continuation", "shown"),
    [(" man  ", " man"), ("esting", "esting"), ("\n\n man", " man"), (" m\N{REPLACEMENT CHARACTER}", " m"), ("  ", "")],
)
def test_only_words_tell_who_wrote_a_text(continuation, shown):
    assert tidy(continuation) == shown


def test_the_whole_way_on_the_command_line(tiny, tmp_path):
    def call(*arguments):
        found = CliRunner().invoke(study_app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return found.stdout

    folder = tmp_path / "study"
    few = ["--prefixes", 4, "--checks", 2, "--qualification", 4, "--candidates", 4]
    made = json.loads(call("create", tiny, tiny, "--out", folder, "--a", "base", "--b", "joint", *few, "--json"))
    assert (made["check"], made["qualification"], made["pair"] + made["same"]) == (2, 4, 4)
    links = json.loads(call("invite", folder, "--raters", 2, "--address", "https://study.example.org/", "--json"))
    assert [link["label"] for link in links["invitations"]] == ["rater 1", "rater 2"]
    assert links["invitations"][0]["link"].startswith("https://study.example.org/#")
    assert "simulated raters have answered" in call("simulate", folder, "--raters", 4, "--seed", 1)
    summary = json.loads(call("report", folder, "--json"))
    assert summary["raters"]["simulated"] == 4
    assert json.loads((tiny / "studies" / "study.json").read_text())["votes"] == summary["votes"]
    shown = call("report", folder)
    assert shown.startswith("SIMULATED: 4 of 6 raters")
    for words in ("Is B preferred?", "Krippendorff", "Raters"):
        assert words in shown
    assert "freenergy study · simulated" in (folder / "report.html").read_text()
