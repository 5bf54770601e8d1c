"""A study behind a proxy: who can keep raters out, who is believed, and what is counted."""

import httpx
import pytest

from freenergy import UserError
from freenergy.apps.study import Store, Study, StudySettings
from freenergy.apps.study.items import Item
from freenergy.apps.study.web import COOKIE, Attempts, create_study_app
from freenergy.web.connections import SocketLimits
from freenergy.web.running import LimitedServer, checked_proxies

FORWARDED = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "https"}


@pytest.fixture
def store(tmp_path):
    kinds = ["pair"] * 6 + ["check"] * 2 + ["qualification"] * 2
    items = [Item(number=i, kind=kind, prefix=f"p{i}", a=f"a{i}", b=f"b{i}") for i, kind in enumerate(kinds)]
    models = {side: {"name": side, "run": None} for side in "ab"}
    settings = StudySettings(prefixes=6, checks=2, qualification=2)
    with Store(Study(folder=tmp_path / "s", settings=settings, models=models, items=tuple(items)).write()) as store:
        yield store


@pytest.fixture
def serve_study(store, serving):
    return lambda *proxies: serving(create_study_app(store, hosts=None), proxies=proxies)


def enter(address, token, **headers):
    return httpx.post(f"{address}/enter", data={"token": token}, headers=headers, follow_redirects=False)


def test_wrong_invitations_keep_nobody_else_out(store, serve_study):
    """D8: ten wrong ones from the address that all raters share."""
    with serve_study() as address:
        wrong = [enter(address, f"wrong-{i}").status_code for i in range(12)]
        assert wrong == [403] * 10 + [429] * 2
        assert enter(address, store.invite(1)[0].token).status_code == 303
        assert enter(address, "wrong-again").headers["retry-after"]


def test_a_proxy_is_believed_only_where_it_is_named(store, serve_study):
    tokens = [invitation.token for invitation in store.invite(2)]
    with serve_study() as address:
        assert "Secure" not in enter(address, tokens[0], **FORWARDED).headers["set-cookie"]
    with serve_study("127.0.0.1") as address:
        cookie = enter(address, tokens[1], **FORWARDED).headers["set-cookie"]
        assert "Secure" in cookie
        assert COOKIE in cookie
        for i in range(10):
            enter(address, f"wrong-{i}", **FORWARDED)
        assert enter(address, "wrong", **FORWARDED).status_code == 429
        assert enter(address, "wrong", **{**FORWARDED, "x-forwarded-for": "203.0.113.8"}).status_code == 403
    with serve_study("192.0.2.1") as address:
        assert "Secure" not in enter(address, tokens[1], **FORWARDED).headers["set-cookie"]


def test_a_proxy_is_an_address():
    assert checked_proxies(["127.0.0.1", "10.0.0.0/8", "::1"]) == ["127.0.0.1", "10.0.0.0/8", "::1"]
    for wrong in ("*", "proxy.example.org", ""):
        with pytest.raises(UserError, match="is not an IP address"):
            checked_proxies([wrong])


def test_attempts_are_bounded():
    attempts = Attempts()
    for i in range(30_000):
        attempts.add(f"address {i}")
    assert len(attempts._times) <= 10_000


def test_another_site_cannot_enter_for_its_visitors(store, serve_study):
    token = store.invite(1)[0].token
    with serve_study() as address:
        assert enter(address, token, **{"sec-fetch-site": "cross-site"}).status_code == 403
        assert enter(address, token, **{"sec-fetch-site": "same-origin"}).status_code == 303


def test_sent_again_with_other_answers_is_told(store, serve_study):
    import re

    with serve_study() as address, httpx.Client(base_url=address) as client:
        client.post("/enter", data={"token": store.invite(1)[0].token})
        html = client.get("/rate").text
        page = re.search(r'name="page" value="([^"]+)"', html)[1]
        first = {"page": page, "place-0": "1", "place-1": "1"}
        assert client.post("/rate", data=first).status_code == 303
        assert client.post("/rate", data=first).status_code == 303
        changed = client.post("/rate", data={**first, "place-1": "2"})
    assert changed.status_code == 409
    assert "not counted" in changed.text


def test_limits_hold_for_the_study_too(store):
    server = LimitedServer(create_study_app(store, hosts=None), SocketLimits())
    assert server.config.proxy_headers is False
