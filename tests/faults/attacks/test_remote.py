"""A hostile model server: slow, garbage, NaN, endless, a bomb of zeros; each is one sentence in bounded time."""

import gzip
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from freenergy import RemoteLM, Rng, Sequences, SequenceSpace, UserError
from freenergy.lm import completions

GOOD = b'{"choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": %s}]}'


@contextmanager
def hostile(answer):
    """A server whose POST does what ``answer`` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            try:
                answer(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler, body, *headers, status=200):
    handler.send_response(status)
    for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers):
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def endless(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    while True:
        handler.wfile.write(b" " * 65536)


def trickle(handler):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def bomb(handler):
    send(handler, gzip.compress(bytes(2**26)), ("Content-Encoding", "gzip"))


NUMBERS = b'{"tokens": ["token_id:1"], "token_logprobs": [%s], "top_logprobs": [{"token_id:1": %s}]}'
CASES = {
    "silent": lambda handler: time.sleep(3),
    "garbage": lambda handler: send(handler, b"\x00\xff<html>"),
    "another shape": lambda handler: send(handler, b'{"choices": {"a": [[[]]]}}'),
    "deep": lambda handler: send(handler, b"[" * 100_000),
    "not a number": lambda handler: send(handler, GOOD % (NUMBERS % (b"NaN", b"NaN"))),
    "too likely": lambda handler: send(handler, GOOD % (NUMBERS % (b"5.0", b"5.0"))),
    "endless": endless,
    "a trickle": trickle,
    "a bomb": bomb,
    "hangs up": lambda handler: handler.connection.close(),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_server_is_one_sentence(name, monkeypatch):
    monkeypatch.setattr(completions, "_MOST_BYTES", 2**22)
    monkeypatch.setattr(completions, "_ANSWER_TIMEOUTS", 2)
    monkeypatch.setattr(completions, "_FIRST_WAIT_SECONDS", 0.01)
    space, start = SequenceSpace(vocab_size=5, length=1), time.monotonic()
    with hostile(CASES[name]) as url:
        remote = RemoteLM(url=url, model="x", vocab_size=5, eos=0, timeout_seconds=0.5)
        with pytest.raises(UserError) as refused:
            remote.sample(Sequences.from_lists([[1]]), 1, space, Rng(0))
    assert "\n" not in str(refused.value)
    assert time.monotonic() - start < 20
