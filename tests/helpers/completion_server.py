"""A small completions server in the dialects of vLLM and llama.cpp, written with transformers and the standard library.

    python completion_server.py MODEL_FOLDER        prints the port it listens on (loopback only)

It shares no code with the package. The first part of the path selects the dialect and what the server does wrong,
joined by "+": ``/chat+no-echo/v1/completions``; ``/busy2/…`` answers 503 twice, then works. What follows "-name" only
keeps the counts and the log of one test apart from another's; GET shows the log.
"""

import json
import math
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM

HALF_A_CHARACTER = 7  # the token that "partial" keeps quiet about, as llama.cpp does inside a character


class Law:
    """The model's next-token law, remembered by prefix."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.eos = self.model.config.eos_token_id
        self.lock = threading.Lock()
        self.memory = {}

    @torch.no_grad()
    def __call__(self, ids):
        with self.lock:
            key = tuple(ids)
            if key not in self.memory:
                logits = self.model(torch.tensor([ids])).logits[0, -1]
                self.memory[key] = logits.double().log_softmax(-1)
            return self.memory[key]


def bent(log_p, body):
    """Bias, temperature, top-k and nucleus, in vLLM's order."""
    logits = log_p.clone()
    for token, bias in (body.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    logits = logits / body.get("temperature", 1.0)
    order = logits.argsort(descending=True)
    top_k = body.get("top_k", -1)
    kept = order[: top_k if top_k > 0 else len(order)]
    p = logits[kept].softmax(-1)
    before = p.cumsum(-1) - p
    kept = kept[before < body.get("top_p", 1.0)] if body.get("top_p", 1.0) < 1 else kept
    out = torch.full_like(logits, -math.inf)
    out[kept] = logits[kept].log_softmax(-1)
    return out


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a reply's second packet waits 40 ms for the first one's receipt
    law: Law
    seen: ClassVar[Counter] = Counter()
    requests: ClassVar[dict] = {}
    requests_lock = threading.Lock()

    def log_message(self, *args):
        pass

    def do_GET(self):
        """What was asked under a path so far."""
        with self.requests_lock:
            self.reply(200, self.requests.get(self.path.split("/")[1], []))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        first = self.path.split("/")[1]
        faults = {part.split("-name")[0] for part in first.split("+")}
        with self.requests_lock:
            self.seen[first] += 1
            turn = self.seen[first]
            self.requests.setdefault(first, []).append({**body, "authorization": self.headers.get("authorization")})
        if not self.trouble(body, faults, turn):
            choices = [self.choice(i, prompt, body, faults) for i, prompt in enumerate(body["prompt"])]
            drawn = sum(choice.pop("drawn") for choice in choices)
            if "lose-an-answer" in faults:
                choices = choices[1:]
            whole = {"choices": choices, "usage": {"completion_tokens": drawn}}
            apart = [{"choices": [choice]} for choice in choices]
            self.reply(200, apart if "apart" in faults else whole)

    def trouble(self, body, faults, turn):
        """True when the request went wrong before any model was asked."""
        counted = {m[1]: int(m[2]) for m in (re.fullmatch(r"(busy|reset)(\d+)", f) for f in faults) if m}
        limit = next((int(f[3:]) for f in faults if f.startswith("max")), 10**9)
        if turn <= counted.get("busy", 0):
            self.reply(503, {"error": {"message": "loading"}})
        elif turn <= counted.get("reset", 0):
            self.close_connection = True
            self.connection.close()
        elif "500" in faults:
            self.reply(500, {"error": {"message": "CUDA is out of memory"}})
        elif "401" in faults:
            self.reply(401, {"error": "no key"})
        elif "html" in faults:
            self.reply(200, "<html><body>It works!</body></html>", "text/html")
        elif "slow" in faults:
            time.sleep(1.0)
            self.reply(200, {"choices": []})
        elif body.get("echo") and "no-echo" in faults:
            self.reply(400, {"error": {"message": "Only no echo is supported"}})
        elif body["max_tokens"] == 0 and "refuse-zero" in faults:
            self.reply(400, {"message": "max_tokens must be at least 1"})
        elif body["logprobs"] > limit:
            self.reply(400, {"message": f"Requested sample logprobs of {body['logprobs']}, more than {limit}"})
        else:
            return False
        return True

    def choice(self, index, prompt, body, faults):
        """One choice: steps are (token, log-prob or None, list of the likeliest)."""
        sent = [self.law.eos, *prompt] if "bos" in faults else prompt
        echoed = body.get("echo") and not faults & {"ignore-echo", "no-echo"}
        steps = [self.step(sent[:t], sent[t], body, faults) for t in range(len(sent))] if echoed else []
        drawn, finish = self.draw(sent, body, faults)
        told = [step for step in steps + drawn if not ("partial" in faults and step[0] == HALF_A_CHARACTER)]
        if "omit-eos" in faults and finish == "stop":
            told, drawn = told[:-1], drawn[:-1]
        if "lose-a-token" in faults:
            told = told[:-1]
        out = {"index": index, "text": "…", "finish_reason": finish, "drawn": len(drawn)}
        if "no-logprobs" in faults:
            return {**out, "logprobs": None}
        return {**out, **self.shaped(told, len(sent) if echoed else 0, body, faults)}

    def draw(self, prompt, body, faults):
        rng = torch.Generator().manual_seed(body.get("seed", 0) % 2**63 + (1 if "other-seed" in faults else 0))
        steps, ids = [], list(prompt)
        for _ in range(body["max_tokens"]):
            law = self.law(ids)
            if "wrong-law" in faults:  # the mutant: flattens the law, and reports the right one
                law = (law * 0.5).log_softmax(-1)
            q = law if "ignore-truncation" in faults else bent(law, body)
            token = int(torch.multinomial(q.exp(), 1, generator=rng))
            steps.append(self.step(ids, token, body, faults))
            ids.append(token)
            if token == self.law.eos:
                return steps, "stop"
        return steps, "length"

    def step(self, before, token, body, faults):
        if not before:
            return token, None, None
        law = bent(self.law(before), body) if "processed" in faults else self.law(before)
        size = min(body["logprobs"], 2 if "short-lists" in faults else 10**9)
        likeliest = law.argsort(descending=True)[:size].tolist()
        shift = 100 if "bad-ids" in faults else 0
        value = float(law[token]) if "nan" not in faults else math.nan
        return token + shift, value, {t + shift: max(float(law[t]), -9999.0) for t in likeliest}

    def shaped(self, steps, num_prompt, body, faults):
        def spelled(token):
            return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else f"word{token}"

        if "prompt-logprobs" in faults and num_prompt:
            rows = [
                None if top is None else {str(t): {"logprob": p} for t, p in {**top, token: value}.items()}
                for token, value, top in steps[:num_prompt]
            ]
            return {"prompt_logprobs": rows, "logprobs": None}
        if "chat" in faults:
            content = [
                {"id": t, "token": "w", "logprob": p, "top_logprobs": [{"id": o, "logprob": q} for o, q in top]}
                for t, p, top in ((t, p, (top or {}).items()) for t, p, top in steps)
            ]
            return {"logprobs": {"content": content} if content else None}
        if "text" in faults:
            body = {**body, "return_tokens_as_token_ids": False}
        lists = [
            None if top is None else {spelled(t): p for t, p in {token: value, **top}.items()}
            for token, value, top in steps
        ]
        legacy = {
            "tokens": [spelled(token) for token, _, _ in steps],
            "token_logprobs": [value for _, value, _ in steps],
            "top_logprobs": lists,
            "text_offset": [0] * len(steps),
        }
        ids = {"token_ids": [token for token, _, _ in steps[num_prompt:]]} if "ids" in faults else {}
        return {"logprobs": legacy, **ids}

    def reply(self, status, content, kind="application/json"):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Handler.law = Law(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
