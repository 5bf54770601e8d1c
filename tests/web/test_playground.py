"""What the playground asks and is told: the numbers of the package, one sentence for what is wrong, no other files."""

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

import freenergy.web.playground as playground
from freenergy import Sequences, Truncation, UserError
from freenergy.core.scored import Scored
from freenergy.core.sequences import Continuations
from freenergy.energies.prefix_energies import energies_of_beginnings
from freenergy.partition import log_partition
from freenergy.web.app import create_app
from freenergy.web.model_server import ModelServer
from freenergy.web.playground import EVENNESS, evenness
from freenergy.web.settings import Limits, ServerSettings

from .playground_fixtures import LENGTH, repeats, small_joint

FOLDER = Path(playground.__file__).with_name("playground")
TOKEN = "0123456789abcdefgh"
HOST = "http://127.0.0.1"


@pytest.fixture(scope="module")
def joint():
    return small_joint()


def client_of(joint, limits=None, **settings):
    return TestClient(create_app(ModelServer(joint, limits or Limits()), ServerSettings(**settings)), base_url=HOST)


@pytest.fixture(scope="module")
def client(joint):
    with client_of(joint, Limits(rows=16)) as found:
        yield found


def lines_of(client, **asked):
    answer = client.post("/playground/write", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def drawn_in(lines, part=0):
    return [one for line in lines if line["event"] == "drawn" and line["part"] == part for one in line["candidates"]]


def test_the_text_is_that_of_the_package(client, joint):
    """The same seed and settings give what ResidualModel.sample gives, with every candidate on the way."""
    lines = lines_of(client, prefix="You may", candidates=40, seed=6)
    drawn, last = drawn_in(lines), lines[-1]
    assert [one["number"] for one in drawn] == list(range(40))
    assert sum(line["event"] == "drawn" for line in lines) > 1, "all candidates came at once"
    found = joint.sample("You may", candidates=40, seed=6)
    rows = found.to_json(candidates=True)["steps"][0]["candidates"]
    for name in ("text", "log_base", "energy", "log_weight"):
        assert [one[name] for one in drawn] == pytest.approx([row[name] for row in rows]), name
    chosen = drawn[last["steps"][0]["chosen"]]
    assert last["event"] == "written"
    assert last["text"] == chosen["text"] == found[0].text
    assert last["notes"] == found.all_notes()
    assert last["steps"][0]["ess"] == pytest.approx(found.to_json()["steps"][0]["ess"])
    assert all(one["log_weight"] == pytest.approx(-one["energy"]) for one in drawn)


def test_truncation_and_law_are_passed_on(client, joint):
    asked = {"prefix": "You may", "candidates": 30, "top_k": 3, "temperature": 1.5, "seed": 2}
    truncation = Truncation(top_k=3, temperature=1.5)
    for law in ("restricted", "model"):
        found = joint.sample("You may", candidates=30, truncation=truncation, seed=2, law=law)
        rows = found.to_json(candidates=True)["steps"][0]["candidates"]
        drawn = drawn_in(lines_of(client, **asked, law=law))
        assert [one["log_weight"] for one in drawn] == pytest.approx([row["log_weight"] for row in rows])
    assert any(one["log_weight"] != pytest.approx(-one["energy"]) for one in drawn)


def test_a_long_text_is_written_part_by_part(client, joint):
    lines = lines_of(client, prefix="You may", candidates=20, length=2 * LENGTH + 3, seed=1)
    added, last = [line["text"] for line in lines if line["event"] == "added"], lines[-1]
    assert len(last["steps"]) == len(added) == 3
    assert added[-1] == last["text"]
    assert all(after.startswith(before) for before, after in itertools.pairwise(added))
    contexts = [line["context"] for line in lines if line["event"] == "drawn"]
    assert contexts[0] == joint.tokenizer.encode("You may")
    first = drawn_in(lines)[last["steps"][0]["chosen"]]
    second = next(line for line in lines if line["event"] == "drawn" and line["part"] == 1)
    assert second["context"] == (contexts[0] + first["tokens"])[-40:]
    assert added[0] == first["text"]


def test_what_is_forbidden_has_no_number(joint):
    bad = joint.tokenizer.encode(" the")[0]

    def forbids(x):
        return torch.where((x.tokens == bad).any(-1), torch.inf, repeats(x))

    with client_of(small_joint(forbids)) as client:
        drawn = drawn_in(lines_of(client, prefix="You may", candidates=200))
    forbidden = [one for one in drawn if bad in one["tokens"]]
    assert 0 < len(forbidden) < 200
    assert all(one["energy"] is None and one["log_weight"] is None for one in forbidden)
    assert all(one["energy"] is not None for one in drawn if bad not in one["tokens"])


def test_an_error_on_the_way_is_the_last_line():
    calls = []

    def breaks(x):
        calls.append(x)
        if len(calls) == 3:
            raise UserError("the energy is tired: let it rest")
        return repeats(x)

    with client_of(small_joint(breaks), Limits(rows=16)) as client:
        lines = lines_of(client, candidates=39)
    assert [line["event"] for line in lines] == ["drawn", "drawn", "error"]
    assert lines[-1]["message"] == "the energy is tired: let it rest"


def weighed(*log_weight):
    log_w = torch.tensor([log_weight], dtype=torch.float64)
    n = len(log_weight)
    x = Continuations(Sequences.from_lists([[1]]), torch.arange(n).view(1, n, 1), torch.ones(1, n, dtype=torch.long))
    return Scored(x=x, log_base=torch.zeros_like(log_w), log_proposal=torch.zeros_like(log_w), energy=-log_w)


@pytest.mark.parametrize(
    ("log_weights", "word"),
    [
        ([0.1 * math.sin(i) for i in range(400)], "healthy"),
        ([0.0] * 20 + [-9.0] * 380, "thin"),  # 20 of 400 are effective
        ([3.0 * math.sin(i) for i in range(50)], "thin"),
        ([10.0] + [0.0] * 400, "one candidate decides"),
        ([0.0], "one candidate decides"),
    ],
)
def test_the_word_is_the_verdict(log_weights, word):
    candidates = weighed(*log_weights)
    assert evenness(candidates) == word
    if len(log_weights) > 1:
        assert bool(log_partition(candidates.log_weight).verdicts()[0]) == (word != "healthy")


def test_of_several_parts_the_worst_word_is_told(client):
    last = lines_of(client, prefix="You may", candidates=8, length=5 * LENGTH, seed=1)[-1]
    words = [step["word"] for step in last["steps"]]
    assert last["word"] == max(words, key=EVENNESS.index)
    assert len(set(words)) > 1, "the test needs parts that differ"


def test_the_next_token_table_is_that_of_the_package(client, joint):
    answer = client.post("/playground/next", json={"prefix": "You may", "top_k": 4, "completions": 16, "seed": 3})
    assert answer.status_code == 200
    found = json.loads(json.dumps(joint.next("You may", top_k=4, completions=16, seed=3).to_json()))
    assert answer.json()["rows"] == found["rows"]
    assert answer.json() == found
    assert sum(row["joint"] for row in found["rows"]) + found["other"]["joint"] == pytest.approx(1)


def test_where_the_energy_rises(client, joint):
    """A candidate by its tokens: the last energy is the one that it was weighed with."""
    lines = lines_of(client, prefix="You may", candidates=5)
    one, context = drawn_in(lines)[3], lines[0]["context"]
    answer = client.post("/playground/rising", json={"context": context, "tokens": one["tokens"]}).json()
    E = energies_of_beginnings(joint.energy, context, one["tokens"]).tolist()
    pieces = answer["pieces"]
    assert "".join(piece["text"] for piece in pieces) == one["text"]
    assert pieces[-1]["energy"] == pytest.approx(one["energy"])
    assert pieces[0]["rise"] is None
    if len(pieces) == len(E):
        assert [piece["rise"] for piece in pieces[1:]] == pytest.approx([b - a for a, b in itertools.pairwise(E)])
    typed = client.post("/playground/rising", json={"prefix": "You may", "text": " copy it"}).json()["pieces"]
    assert "".join(piece["text"] for piece in typed) == " copy it"


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("write", {"candidates": 100_000}, "candidates is 100000: this server takes 1 to 4096"),
        ("write", {"length": 10**9}, "1000000000"),
        ("write", {"temperature": 0}, "temperature"),
        ("write", {"law": "both"}, "law"),
        ("write", {"prefix": 3}, "prefix"),
        ("write", {"unknown": 3}, "unknown"),
        ("write", {"seed": -1}, "seed"),
        ("next", {"top_k": 0}, "top_k"),
        ("next", {"completions": 10**6}, "completions"),
        ("rising", {}, "as text or as tokens"),
        ("rising", {"text": "a", "tokens": [1]}, "as text or as tokens"),
        ("rising", {"text": ""}, "is empty"),
        ("rising", {"tokens": []}, "no text to read"),
        ("rising", {"tokens": [10**6]}, "is not below"),
        ("rising", {"tokens": [-1]}, "tokens"),
        ("rising", {"tokens": [1] * 600}, "at most 512"),
    ],
)
def test_bad_questions_are_one_sentence(client, path, asked, words):
    answer = client.post(f"/playground/{path}", json=asked)
    assert 400 <= answer.status_code < 500
    message = answer.json()["error"]["message"]
    assert words in message
    assert "\n" not in message
    assert "Traceback" not in message


def test_only_who_has_the_token_may_ask(joint):
    with client_of(joint, token=TOKEN) as client:
        assert client.get("/").status_code == 200
        assert client.get("/playground/main.js").status_code == 200
        for path in ("write", "next", "rising"):
            assert client.post(f"/playground/{path}", json={}).status_code == 401
        assert client.get("/playground/about").status_code == 401
        assert "token" in client.get("/playground/about").json()["error"]["message"]
        assert client.get("/playground/about", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/playground/about", headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401


def test_what_the_page_knows_at_first(client, joint, tmp_path):
    found = client.get("/playground/about").json()
    assert found["name"] == "freenergy"
    assert found["has_energy"] is True
    assert found["trained_length"] == found["defaults"]["length"] == LENGTH
    assert found["limits"]["top_k"] == joint.base.vocab_size
    assert found["examples"]
    (tmp_path / "evaluation").mkdir()
    shown = {"examples": [{"prefix": "held out"}, {"prefix": "held out"}], "samples": [{"prefix": "another"}]}
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps(shown))
    with client_of(joint, folder=tmp_path) as other:
        assert other.get("/playground/about").json()["examples"] == ["held out", "another"]
    assert playground.examples_of(tmp_path / "nowhere") == found["examples"]


class Reader(HTMLParser):
    """The tags of a page."""

    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_loads_what_is_there_and_nothing_else(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    reader = Reader()
    reader.feed(answer.text)
    named = [found[key] for tag, found in reader.tags for key in ("src", "href") if key in found]
    for path in named:
        assert path.startswith(("/playground/", "#", "data:,")), path
        if path.startswith("/"):
            assert client.get(path).status_code == 200
    assert not any(key.startswith("on") or key == "style" for _, found in reader.tags for key in found)
    ids = [found["id"] for _, found in reader.tags if "id" in found]
    assert len(ids) == len(set(ids))
    labelled = {found["for"] for tag, found in reader.tags if tag == "label" and "for" in found}
    for tag, found in reader.tags:
        if tag in ("textarea", "select") or (tag == "input" and found["type"] in ("number", "password")):
            assert found["id"] in labelled, found


def test_scripts_import_one_another_and_touch_no_html(client):
    scripts = sorted(FOLDER.glob("*.js"))
    assert len(scripts) > 5
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 300, path.name
        answer = client.get(f"/playground/{path.name}")
        assert answer.headers["content-type"].startswith("text/javascript")
        assert answer.text == text
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (FOLDER / name).is_file(), name
        for id_ in re.findall(r'byId\("([\w-]+)"\)', text):
            assert f'id="{id_}"' in page, id_
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https:", ".cssText"):
            assert banned not in text, (path.name, banned)


@pytest.mark.parametrize(
    "path", ["index.html", "../engine.py", "..%2fengine.py", "%2e%2e/engine.py", "main.js/..", "playground.py", "x.js"]
)
def test_no_other_file_is_served(client, path):
    assert client.get(f"/playground/{path}").status_code in (404, 405)
