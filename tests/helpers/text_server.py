"""A server on loopback that returns texts and nothing else, in the dialects of OpenAI; it draws from a language model.

The first part of the path selects what it does wrong: ``/logprobs-free`` nothing, ``/html``, ``/wrong``, ``/short``.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from freenergy import Rng, Sequences, SequenceSpace


@contextmanager
def text_server(lm, tokenizer, length):
    """Serve ``lm``; a text of seed s is the draw of ``Rng(s)``, of at most ``length`` tokens."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({**body, "authorization": self.headers.get("authorization")})
            is_chat = self.path.endswith("/chat/completions")
            text, finish = drawn(lm, tokenizer, length, body, is_chat)
            finish = "length" if self.path.startswith("/short") else finish
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            answer = {"choices": [{"index": 0, **choice, "finish_reason": finish}]}
            data = json.dumps({"choices": [{}]} if self.path.startswith("/wrong") else answer).encode()
            data = b"<html></html>" if self.path.startswith("/html") else data
            self.send_response(500 if self.path.startswith("/broken") else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def drawn(lm, tokenizer, length, body, is_chat):
    """The text of a request, and why it stopped."""
    prefix = body["messages"][-1]["content"] if is_chat else body["prompt"]
    space = SequenceSpace(vocab_size=lm.vocab_size, length=length, eos=lm.eos)
    draws = lm.sample(Sequences.from_lists([tokenizer.encode(prefix)]), 1, space, Rng(body["seed"]))
    [tokens] = draws.x.lists()[0]
    ended = tokens[-1] == lm.eos
    return tokenizer.decode(tokens), "stop" if ended else "length"
