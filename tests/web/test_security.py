"""Who may ask, how much, under which name; and what no answer tells."""

import logging
import socket

import httpx
import pytest
import torch
from fastapi import FastAPI, Request

from freenergy import UserError
from freenergy.web.running import address, bound
from freenergy.web.security import LOOPBACK_HOSTS, is_loopback, same_token, secure
from freenergy.web.settings import ServerSettings

TOKEN = "a-token-of-twenty-odd-letters"
COMPLETION = {"model": "tiny", "prompt": "a", "candidates": 4, "seed": 1}
PATHS = ["/", "/health", "/v1/models", "/v1/completions", "/nowhere", "/openapi.json", "/metrics"]


@pytest.fixture(scope="module")
def guarded(serve):
    """A server with a token and a small limit of bytes."""
    with serve(token=TOKEN, max_bytes=2000) as (address, engine):
        yield address, engine


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_headers(server, path):
    response = httpx.get(f"{server}{path}")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "no-store" in response.headers["cache-control"] or path == "/"
    assert "server" not in response.headers
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.1:1"])
def test_names_of_this_machine(server, host):
    assert httpx.get(f"{server}/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost:80:80"])
def test_other_names_are_refused(server, host):
    """A page whose name was made to point at 127.0.0.1 cannot read an answer."""
    response = httpx.get(f"{server}/v1/models", headers={"host": host})
    assert response.status_code == 400
    assert "Host" in response.json()["error"]["message"]
    assert "tiny" not in response.text
    assert "content-security-policy" in response.headers


def test_requests_beyond_the_limit(guarded):
    where, headers = guarded[0], {"authorization": f"Bearer {TOKEN}"}
    large = {**COMPLETION, "prompt": "a" * 2000}
    response = httpx.post(f"{where}/v1/completions", json=large, headers=headers)
    assert response.status_code == 413
    assert "2,000 bytes" in response.json()["error"]["message"]

    def pieces():
        for _ in range(100):
            yield b'{"prompt": "' + b"a" * 100

    kind = {"content-type": "application/json", **headers}
    response = httpx.post(f"{where}/v1/completions", content=pieces(), headers=kind)  # no content-length
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{where}/v1/completions", json=COMPLETION, headers=headers).status_code == 200


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 30, "²"])
def test_a_length_that_is_no_number(length):
    """Straight at the app, since an HTTP server would not let it through."""
    app = FastAPI()
    secure(app, max_bytes=100, hosts=None)
    sent = []

    async def run():
        async def receive():
            raise AssertionError("nothing is read")

        async def send(message):
            sent.append(message)

        headers = [(b"content-length", length.encode("latin-1"))]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
        await app(scope, receive, send)

    import asyncio

    asyncio.run(run())
    assert sent[0]["status"] in (400, 413)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_only_json_is_read(server, kind):
    """What a form on another page could send without being asked first."""
    headers = {} if kind is None else {"content-type": kind}
    for path in ("/v1/completions", "/score"):
        response = httpx.post(f"{server}{path}", content=b'{"model": "tiny"}', headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["message"]
    assert httpx.options(f"{server}/v1/completions", headers={"origin": "http://evil.example"}).status_code == 405


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"]
)
def test_the_token_is_asked_for(guarded, given):
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/score")):
        response = httpx.request(method, f"{guarded[0]}{path}", headers=headers, json=COMPLETION)
        assert response.status_code == 401, path
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in response.text
    assert httpx.get(f"{guarded[0]}/health").status_code == 200


def test_the_token_opens_and_is_never_logged(guarded, caplog, capfd):
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    caplog.set_level(logging.DEBUG, logger="freenergy")
    for headers in ({"authorization": f"Bearer {TOKEN}"}, {"authorization": f"bearer {TOKEN}"}):
        assert httpx.post(f"{guarded[0]}/v1/completions", json=COMPLETION, headers=headers).status_code == 200
        httpx.get(f"{guarded[0]}/v1/models/{TOKEN}", headers=headers)
    out, err = capfd.readouterr()
    assert TOKEN not in caplog.text + out + err
    assert TOKEN not in repr(ServerSettings(token=TOKEN))


def test_a_failure_inside_is_logged_and_not_told(serve, make_joint, caplog):
    def broken(x):
        if x.contexts.lists()[0][-1:] == [ord("!")]:
            raise RuntimeError("secret of the machine")
        return torch.zeros(x.shape, dtype=torch.float64)

    with serve(make_joint(energy=broken)) as (where, engine):
        for is_streamed in (False, True):
            response = httpx.post(f"{where}/v1/completions", json={**COMPLETION, "prompt": "a!", "stream": is_streamed})
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert "secret" not in response.text
            assert "content-security-policy" in response.headers
        assert "secret of the machine" in caplog.text
        late = {**COMPLETION, "prompt": "", "max_tokens": 60, "stream": True}
        assert httpx.post(f"{where}/v1/completions", json=late).text.endswith("data: [DONE]\n\n")
        assert httpx.post(f"{where}/v1/completions", json=COMPLETION).status_code == 200, "the server lives on"
        assert len(engine.turns) == 0


def test_trouble_in_the_middle_of_a_stream_is_an_event(serve, make_joint):
    def later(x):
        if x.contexts.lengths.max() > 4:
            raise RuntimeError("secret")
        return torch.zeros(x.shape, dtype=torch.float64)

    with serve(make_joint(energy=later)) as (where, _):
        body = {**COMPLETION, "max_tokens": 60, "stream": True, "temperature": 0.01}
        response = httpx.post(f"{where}/v1/completions", json=body)
    assert response.status_code == 200
    assert '"type": "server_error"' in response.text.strip().splitlines()[-1]
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/playground/../../app.py", "/%2e%2e/%2e%2e/etc/passwd", "/playground/%2e%2e%2fapp.py"],
)
def test_no_path_leads_to_a_file(server, path):
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b" 404 " in answer.split(b"\r\n")[0]
    assert b"root:" not in answer
    assert b"import" not in answer


# settings


def test_tokens_and_hosts():
    assert same_token("é", "é")
    assert not same_token("a", "b")
    assert not same_token("a", "")
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8")] == [True] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5
    assert set(LOOPBACK_HOSTS) == {"127.0.0.1", "localhost", "[::1]"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "is reachable from other machines and no token is set"),
        ({"host": "192.168.1.2"}, "FREENERGY_TOKEN"),
        ({"token": "short"}, "too short"),
        ({"token": ""}, "too short"),
        ({"token": "ééééééééééééééééééé"}, "not printable"),
        ({"name": ""}, "name is ''"),
        ({"name": "a\nb"}, "printable name"),
    ],
)
def test_settings_that_are_not_safe(settings, words):
    with pytest.raises(UserError, match=words):
        ServerSettings(**settings)


def test_settings_beyond_loopback():
    assert ServerSettings(host="0.0.0.0", token=TOKEN).hosts is None
    assert ServerSettings().hosts == LOOPBACK_HOSTS


def test_sockets():
    with bound("127.0.0.1", 0) as taken:
        port = int(address(taken).rsplit(":", 1)[1])
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            bound("127.0.0.1", port)
    with pytest.raises(UserError, match="the port is 70000"):
        bound("127.0.0.1", 70000)
    with pytest.raises(UserError, match="cannot be found"):
        bound("no.such.host.invalid", 0)
    with bound("::1", 0) as six:
        assert address(six).startswith("http://[::1]:")


def test_another_app_can_be_guarded():
    """The study's app uses the same guard."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    secure(app, max_bytes=10, hosts=("localhost",))
    from fastapi.testclient import TestClient

    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/echo", content=b"0123456789").json() == {"bytes": 10}
        assert client.post("/echo", content=b"0123456789a").status_code == 413
        assert client.post("/echo", content=(bytes([c]) for c in b"0123456789a")).status_code == 413
        assert client.post("/echo", headers={"host": "elsewhere"}).status_code == 400
