"""Slow and rude clients: half requests, answers that nobody reads, two framings, floods of connections; and the end."""

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
import torch

from freenergy.web.connections import AtMost, SocketLimits

SMALL = {"model": "tiny", "prompt": "a", "candidates": 4, "seed": 1}
QUICK = SocketLimits(header_seconds=0.4, body_seconds=0.4, write_seconds=0.6, idle_seconds=1.0, check_seconds=0.05)
TOKEN = "a-token-of-twenty-odd-letters"


def connect(address, data=b"", *, buffer=None):
    host, port = address.removeprefix("http://").split(":")
    found = socket.socket()
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(10)
    found.connect((host, int(port)))
    found.sendall(data)
    return found


def read_all(connection):
    """All that comes until the server closes; a reset counts as closed."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def head(path="/score", *headers):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers, "", ""])


def post(address, *headers, body=b"", path="/score"):
    with connect(address, head(path, *headers, "Connection: close").encode() + body) as connection:
        return read_all(connection)


# time limits


@pytest.mark.parametrize(
    "sent", ["", "GET /health HTTP/1.1\r\nHos", head("/score", "Content-Length: 100") + '{"prefix": ']
)
def test_half_a_request_is_given_up(serve, sent):
    """D3: nothing, half a header, half a body; before, each held its connection for ever."""
    with serve(sockets=QUICK) as (address, _), connect(address, sent.encode()) as connection:
        start = time.monotonic()
        said = read_all(connection)
        assert time.monotonic() - start < 3
    assert said == b"" or said.startswith(b"HTTP/1.1 408"), said
    assert bool(said) == sent.startswith("POST")


def test_an_answer_that_nobody_reads_is_given_up(serve):
    """Half a million log-probabilities into a client that never reads: its connection and its memory are freed."""
    body = {"model": "tiny-base", "prompt": "ab" * 400, "max_tokens": 0, "echo": True, "logprobs": 257}
    content = json.dumps(body).encode()
    request = head("/v1/completions", f"Content-Length: {len(content)}").encode() + content
    with serve(sockets=QUICK) as (address, engine), connect(address, request, buffer=4096):
        server = engine.app_server()
        deadline = time.monotonic() + 30
        while not (server.server_state.total_requests or any(c.cycle for c in server.server_state.connections)):
            time.sleep(0.01)
        while server.server_state.connections:
            assert time.monotonic() < deadline, "the connection was not closed"
            time.sleep(0.05)
        assert httpx.get(f"{address}/health").json()["queue"] == 0


def test_health_answers_through_a_flood_of_half_open_connections(serve):
    """300 connections that send half a header, where 40 may be open."""
    limits = SocketLimits(max_connections=40, reserve=4, check_seconds=0.1)
    with serve(sockets=limits) as (address, _), ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(address, b"GET /health HTTP/1.1\r\nHos"))
        for _ in range(5):
            assert httpx.get(f"{address}/health", timeout=2).status_code == 200
        assert httpx.post(f"{address}/v1/completions", json=SMALL, timeout=5).status_code == 200


def test_the_reserve_is_for_health(serve, make_joint):
    """All places are in use by requests: /health is answered, everything else gets 503 with Retry-After."""
    gate = threading.Event()

    def wait(x):
        assert gate.wait(20)
        return torch.zeros(x.shape, dtype=torch.float64)

    async def crowd(address):
        async with httpx.AsyncClient(base_url=address, timeout=20) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=SMALL)) for _ in range(8)]
            await asyncio.sleep(0.5)
            health = await asyncio.to_thread(httpx.get, f"{address}/health", timeout=5)
            refused = await asyncio.to_thread(httpx.get, f"{address}/v1/models", timeout=5)
            gate.set()
            return health, refused, await asyncio.gather(*tasks)

    with serve(make_joint(energy=wait), sockets=SocketLimits(max_connections=8, reserve=2)) as (address, _):
        health, refused, answers = asyncio.run(crowd(address))
    assert health.status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["type"] == "server_error"
    assert {answer.status_code for answer in answers} == {200}


# framing and bodies


def test_two_framings_are_refused(server):
    chunked = b"2\r\n{}\r\n0\r\n\r\n"
    said = post(server, "Content-Length: 2", "Transfer-Encoding: chunked", body=chunked)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"one of the two" in said
    assert said.count(b"HTTP/1.1") == 1


def test_compressed_bodies_are_refused(server):
    said = post(server, "Content-Encoding: gzip", "Content-Length: 2", body=b"{}")
    assert said.startswith(b"HTTP/1.1 415")


@pytest.mark.parametrize(
    "body", ['{"prefix": "a", "candidates": ["b"], "prefix": "c"}', '{"candidates": ["b"], "x": {"y": 1, "y": 2}}']
)
def test_a_key_twice_is_refused(server, body):
    found = httpx.post(f"{server}/score", content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert "stands twice" in found.json()["error"]["message"]


def test_what_is_not_http_is_refused_in_the_dialect(server):
    with connect(server, b"\x16\x03\x01 nonsense\r\n\r\n") as connection:
        said = read_all(connection)
    assert said.startswith(b"HTTP/1.1 400")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_the_token_is_asked_for_before_the_body(serve):
    """A stranger's body of a megabyte is neither waited for nor parsed."""
    with serve(token=TOKEN) as (address, _), connect(address, head("/score", "Content-Length: 900000").encode()) as one:
        start, said = time.monotonic(), b""
        while b"\r\n\r\n" not in said:
            said += one.recv(4096)
        assert time.monotonic() - start < 2
    assert said.startswith(b"HTTP/1.1 401")
    assert b"www-authenticate: Bearer" in said


def test_an_upgrade_is_not_advised_about(server, caplog):
    with caplog.at_level(logging.WARNING):
        sent = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
        with connect(server, sent.encode()) as connection:
            assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert "pip install" not in caplog.text


def test_logs_are_bounded():
    logger, seen = logging.getLogger("freenergy.test.flood"), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    logger.propagate = False
    logger.addFilter(AtMost(10))
    for i in range(10_000):
        logger.warning("no place for %d", i)
    assert len(seen) <= 20  # a minute may end in between
    assert "left out" in seen[9]


# the end


def test_a_stop_answers_every_client(serve, make_joint, caplog):
    """D7: a stream, a large text and a small one in progress; what is not done in time gets 503 in the dialect."""

    def energy(x):
        time.sleep(0.02)
        return torch.zeros(x.shape, dtype=torch.float64)

    large = {**SMALL, "candidates": 4096, "max_tokens": 600}

    async def stop(address, engine):
        async with httpx.AsyncClient(base_url=address, timeout=20) as client:
            bodies = [large, {**large, "stream": True}, {**SMALL, "candidates": 32}]
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            while len(engine.turns) < 3:
                await asyncio.sleep(0.005)
            engine.app_server().should_exit = True
            return await asyncio.gather(*tasks)

    with serve(make_joint(energy=energy), grace_seconds=0.7) as (address, engine):
        start = time.monotonic()
        one, streamed, small = asyncio.run(stop(address, engine))
        assert time.monotonic() - start < 5
    assert small.status_code == 200, "what is nearly done is finished"
    assert one.status_code == 503
    assert one.json()["error"]["type"] == "server_error"
    assert int(one.headers["retry-after"]) > 0
    assert streamed.status_code == 503 or '"server_error"' in streamed.text
    assert "Traceback" not in caplog.text
    assert "CancelledError" not in caplog.text
