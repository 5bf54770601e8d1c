"""The study's pages as a browser and as somebody who means harm would ask for them."""

import logging
import re
from html import unescape

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'freenergy[web]'")
from starlette.testclient import TestClient

from freenergy.apps.study import Store, Study, StudySettings, summarise
from freenergy.apps.study.items import Item
from freenergy.apps.study.web import COOKIE, create_study_app
from freenergy.web.security import LOOPBACK_HOSTS

BAD = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def store(tmp_path):
    """Six pairs, two questions before them; all texts try to be HTML."""
    kinds = ["pair"] * 6 + ["check"] * 2 + ["qualification"] * 2
    items = [
        Item(number=i, kind=kind, prefix=f"p{i} {BAD}", a=f"a{i} {BAD}", b=f"b{i} {BAD}")
        for i, kind in enumerate(kinds)
    ]
    settings = StudySettings(prefixes=6, checks=2, qualification=2)
    models = {side: {"name": f"secret-{side}", "run": None} for side in "ab"}
    study = Study(folder=tmp_path / "hidden-name", settings=settings, models=models, items=tuple(items)).write()
    with Store(study) as store:
        yield store


@pytest.fixture
def client(store):
    """A browser on this machine."""
    with browser(store) as client:
        yield client


def browser(store):
    app = create_study_app(store, hosts=LOOPBACK_HOSTS)
    return TestClient(app, base_url="http://127.0.0.1:8001", follow_redirects=False)


@pytest.fixture
def rater(store, client):
    """Somebody who has come in by invitation."""
    token = store.invite(1)[0].token
    assert client.post("/enter", data={"token": token}).status_code == 303
    return token


def form(html, choose=lambda first: "b"):
    """What a rater sends who chooses by the first letter of the texts, which is that of the model."""
    found = {"page": re.search(r'name="page" value="([^"]+)"', html)[1]}
    for place, value, words in re.findall(r'id="words-(\d)-(\d)" dir="auto">(.*?)</span>', html, re.DOTALL):
        if unescape(words).startswith(choose(place)):
            found[f"place-{place}"] = value
    return found


def test_from_the_link_to_the_end(store, client, rater):
    assert client.cookies[COOKIE]
    headings = []
    while "<form" in (html := client.get("/rate").text):
        headings.append(re.search("<h1>(.*?)</h1>", html)[1])
        sent = form(html)
        answered = client.post("/rate", data=sent)
        assert (answered.status_code, answered.headers["location"]) == (303, "/rate")
        again = client.post("/rate", data=sent)
        assert again.status_code == 303  # acknowledged, and not counted again
    assert headings == ["Page 1 of 1", "Page 1 of at most 2", "Page 2 of 2"]
    assert "Thank you!" in html
    assert "2 pages of pairs" in html
    found = summarise(store)
    assert found["votes"] == {"given": 6, "dropped": 0, "kept": 6}
    assert found["outcomes"] == {"a": 0, "b": 6, "ties": 0}


def test_a_rater_who_does_not_pass(store, client, rater):
    client.post("/rate", data=form(client.get("/rate").text, lambda place: "a"))
    html = client.get("/rate").text
    assert "Thank you for your time" in html
    assert "<form" not in html


def test_the_cookie_is_for_this_site_and_not_for_scripts(store, client):
    found = client.post("/enter", data={"token": store.invite(1)[0].token})
    cookie = found.headers["set-cookie"].lower()
    assert {"httponly", "samesite=strict", "path=/"} <= set(cookie.split("; "))
    assert "secure" not in cookie  # http on loopback
    with TestClient(client.app, base_url="https://localhost", follow_redirects=False) as safe:
        found = safe.post("/enter", data={"token": store.invite(1)[0].token})
    assert "secure" in found.headers["set-cookie"].lower().split("; ")


def test_pages_are_text_and_fetch_nothing(client, rater):
    for path in ("/", "/rate"):
        found = client.get(path)
        assert BAD not in found.text
        assert "<script>" not in found.text
        assert "onerror=alert" not in re.sub("&lt;.*?&gt;", "", found.text)
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert found.headers["cache-control"] == "no-store"
        assert re.findall(r'(?:src|href)="([^"]*)"', found.text)
        assert set(re.findall(r'(?:src|href)="([^"]*)"', found.text)) <= {
            "data:,",
            "/study.css",
            "/study.js",
            "#rate",
            "/rate",
        }
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in client.get("/rate").text


def test_nothing_tells_which_model_is_which(store, tmp_path):
    """Two studies that differ only in which model is A: their pages are the same but for the order of two texts."""

    def pages(items, folder):
        study = Study(
            folder=folder, settings=store.study.settings, models=store.study.models, items=tuple(items)
        ).write()
        with Store(study) as other, browser(other) as client:
            client.post("/enter", data={"token": other.invite(1)[0].token})
            html = client.get("/rate").text
        assert "secret" not in html
        assert "hidden-name" not in html
        return re.sub(r'name="page" value="[\w-]{43}"', "", html)

    swapped = [Item(number=i.number, kind=i.kind, prefix=i.prefix, a=i.b, b=i.a) for i in store.study.items]
    one, two = pages(store.study.items, tmp_path / "one"), pages(swapped, tmp_path / "two")
    assert one != two
    words = re.compile(r'(id="words-\d-\d" dir="auto">)[ab](\d)')
    assert words.sub(r"\1_\2", one) == words.sub(r"\1_\2", two)


def test_a_check_looks_like_a_pair(client, rater):
    client.post("/rate", data=form(client.get("/rate").text))
    html = client.get("/rate").text
    boxes = re.findall(r"<fieldset.*?</fieldset>", html, re.DOTALL)
    assert len(boxes) == 4
    shapes = {re.sub(r"[pab]?\d", "", box) for box in boxes}
    assert len(shapes) == 1


def test_without_an_invitation_nothing_is_shown_or_counted(store, client):
    assert client.get("/rate").status_code == 401
    assert client.post("/rate", data={"page": "x", "place-0": "1"}).status_code == 401
    client.cookies.set(COOKIE, "forged")
    assert client.get("/rate").status_code == 401
    assert client.post("/enter", data={"token": ""}).status_code == 403
    assert summarise(store)["raters"]["invited"] == 0


def test_a_page_is_answered_by_its_rater_with_its_token(store, client, rater):
    mine = form(client.get("/rate").text)
    with browser(store) as other:
        other.post("/enter", data={"token": store.invite(1)[0].token})
        theirs = form(other.get("/rate").text)
        assert other.post("/rate", data=mine).status_code == 403
    for sent, status in [
        (mine | {"page": theirs["page"]}, 403),
        (mine | {"page": "forged"}, 403),
        ({name: value for name, value in mine.items() if name != "page"}, 403),
        ({"page": mine["page"], "place-0": "1"}, 422),
        (mine | {"place-0": "3"}, 422),
        (mine | {"place-7": "1"}, 422),
        (mine | {"place-0": "1' OR 1=1"}, 422),
    ]:
        assert client.post("/rate", data=sent).status_code == status, sent
    assert summarise(store)["by_rater"][0]["qualification"]["given"] == 0
    assert client.post("/rate", data=mine).status_code == 303


def test_odd_requests(client, rater):
    token = form(client.get("/rate").text)["page"]
    twice = f"page={token}&page={token}&place-0=1&place-1=1"
    many = "&".join(f"place-{i}=1" for i in range(50))
    for content, headers, status in [
        (twice, FORM, 400),
        (many, FORM, 400),
        ("page=%FF", FORM, 400),
        ("pagé=1".encode(), FORM, 400),
        ("{}", {"content-type": "application/json"}, 415),
        ("x" * 20_000, FORM, 413),
    ]:
        assert client.post("/rate", content=content, headers=headers).status_code == status, content[:20]

    def piecewise():
        for _ in range(30):
            yield b"x" * 1000

    assert client.post("/rate", content=piecewise(), headers=FORM).status_code == 413


@pytest.mark.parametrize(
    "path", ["/study.db", "/..%2fstudy.json", "/%2e%2e/answers.sqlite", "/docs", "/openapi.json", "/a/b"]
)
def test_there_are_no_other_pages(client, path):
    found = client.get(path)
    assert found.status_code == 404
    assert "There is no such page." in found.text


def test_only_names_of_this_machine(client):
    assert client.get("/", headers={"host": "evil.example:8001"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:8001"}).status_code == 200


def test_guessing_invitations_is_slowed_down(store, client):
    answers = [client.post("/enter", data={"token": f"guess {i}"}) for i in range(12)]
    assert [answer.status_code for answer in answers] == [403] * 10 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 61
    assert client.post("/enter", data={"token": store.invite(1)[0].token}).status_code == 303, "never kept out"


def test_tokens_are_in_no_log_and_in_no_page(store, client, caplog):
    caplog.set_level(logging.DEBUG)
    token = store.invite(1)[0].token
    client.post("/enter", data={"token": token})
    html = client.get("/rate").text
    client.post("/enter", data={"token": "wrong-" + token})
    said = "".join(record.getMessage() for record in caplog.records)
    for secret in (token, client.cookies[COOKIE]):
        assert secret not in said
        assert secret not in html


def test_going_on_is_offered_to_those_who_were_here(client, rater):
    assert "Go on where you were" in client.get("/").text
    client.cookies.clear()
    assert "Go on where you were" not in client.get("/").text
