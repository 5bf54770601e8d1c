"""The API through the real ``openai`` client, and through our own remote language model."""

import json
import math
import re
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch

from freenergy import Continuations, ResidualModel, Rng, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.remote import RemoteLM
from freenergy.lm.token_log_probs import token_log_probs
from freenergy.models.residual import no_energy
from freenergy.samplers import Resampling
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.registry import KERNELS, sampler_named
from freenergy.text.write import Writing, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """A kernel that stays where it is with some probability, and steps like another otherwise."""

    stay: float = 0.5

    def init(self, target, x):
        return Independence().init(target, x)

    def step(self, target, state, rng):
        moved, info = Independence().step(target, state, rng.child("move"))
        is_still = float(rng.child("stay").uniform(1)) < self.stay
        return (state if is_still else moved), replace(info, is_accepted=info.is_accepted & (not is_still))


openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")


def client_of(address, key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def ask(client):
    """A completion of the residual model with few candidates."""

    def ask(prompt="a bad", **how):
        extra = how.pop("extra_body", {})
        extra = {"candidates": 20, **extra} if how.get("model", "tiny") == "tiny" else extra
        return client.completions.create(**{"model": "tiny", "prompt": prompt, "seed": 3, "extra_body": extra, **how})

    return ask


def test_a_plain_completion_is_the_library_s_text(ask, joint):
    found = ask()
    wanted = joint.sample("a bad", candidates=20, seed=3)
    assert found.object == "text_completion"
    assert found.model == "tiny"
    [choice] = found.choices
    assert choice.text == wanted[0].text
    assert choice.finish_reason == ("stop" if wanted[0].has_ended else "length")
    assert choice.logprobs is None
    assert found.usage.prompt_tokens == 5
    assert found.usage.completion_tokens == len(wanted[0].tokens)
    assert found.usage.total_tokens == 5 + len(wanted[0].tokens)
    extra, step = found.model_extra["freenergy"], wanted.to_json()["steps"][0]
    assert (extra["seed"], extra["sampler"], extra["candidates"], extra["law"]) == (3, "resampling", 20, "restricted")
    for name in ("ess", "largest_share", "k_hat", "log_partition", "standard_error", "distance"):
        assert extra["prompts"][0][name] == pytest.approx(step[name])
    assert extra["prompts"][0]["notes"] == wanted.all_notes()
    own = choice.model_extra["freenergy"]
    assert own["energy"] == pytest.approx(wanted[0].energy)
    assert own["log_score"] == pytest.approx(wanted[0].log_base - wanted[0].energy)
    assert own["share"] == pytest.approx(wanted[0].share)


def test_several_texts_of_several_prompts(ask, joint):
    found = ask(["a bad", "dad "], n=3)
    assert [choice.index for choice in found.choices] == list(range(6))
    sampler = Resampling(candidates=20)
    for i, prompt in enumerate(["a bad", "dad "]):
        wanted = joint.write(prompt, joint.space, stream(3, i), Writing(sampler=sampler, num=3))
        assert [choice.text for choice in found.choices[3 * i : 3 * i + 3]] == [text.text for text in wanted.texts]
    assert len(found.model_extra["freenergy"]["prompts"]) == 2


def test_a_seed_is_chosen_and_told(ask):
    one = ask(seed=openai.NOT_GIVEN)
    again = ask(seed=one.model_extra["freenergy"]["seed"])
    assert again.choices[0].text == one.choices[0].text
    seeds = {ask(seed=openai.NOT_GIVEN).model_extra["freenergy"]["seed"] for _ in range(5)}
    assert len(seeds) == 5


@pytest.mark.parametrize("how", [{}, {"n": 2}, {"max_tokens": 20}, {"max_tokens": 20, "n": 2, "stop": ["b", "zz"]}])
@pytest.mark.parametrize("model", ["tiny", "tiny-base"])
def test_a_stream_says_what_a_plain_answer_says(ask, how, model):
    plain = ask(model=model, **how)
    pieces = list(ask(model=model, stream=True, stream_options={"include_usage": True}, **how))
    *body, last = pieces
    assert last.choices == []
    assert last.usage == plain.usage
    assert all(len(piece.choices) == 1 for piece in body)
    for choice in plain.choices:
        own = [piece.choices[0] for piece in body if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert own[-1].model_extra["freenergy"] == choice.model_extra["freenergy"]
    if how.get("max_tokens") and model == "tiny" and "stop" not in how:
        assert len(body) > 2 * len(plain.choices), "chunks come one by one"
    assert body[-1].model_extra["freenergy"] == plain.model_extra["freenergy"]
    assert len({piece.id for piece in pieces}) == 1


def test_a_stream_as_it_travels(server):
    body = {"model": "tiny", "prompt": "a", "seed": 1, "candidates": 4, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert json.loads(events[0].removeprefix("data: "))["object"] == "text_completion"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("how", [{"max_tokens": 4}, {"max_tokens": 14}])
def test_log_probs_are_the_base_s(ask, joint, echo, how, is_streamed):
    found = ask("a bad", logprobs=2, echo=echo, stream=is_streamed, extra_body={"return_token_ids": True}, **how)
    if is_streamed:
        pieces = [piece.choices[0] for piece in found]
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in (piece.model_extra.get("token_ids") or [])]
        parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        lists = {
            name: [value for part in parts for value in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        [choice] = found.choices
        text, tokens, lists = choice.text, choice.model_extra["token_ids"], choice.logprobs.model_dump()
    prompt = joint.tokenizer.encode("a bad")
    assert text == ("a bad" if echo else "") + joint.tokenizer.decode(tokens)
    numbers = token_log_probs(joint.base, Continuations.from_lists([prompt], [[tokens]]), 2)
    start = len(prompt) if echo else 0
    assert len(lists["tokens"]) == start + len(tokens)
    assert lists["token_logprobs"][start:] == pytest.approx(numbers.log_prob[0, 0].tolist())
    assert all(2 <= len(top) <= 3 for top in lists["top_logprobs"][start:])
    for place, token, offset in zip(lists["top_logprobs"], lists["tokens"], lists["text_offset"], strict=True):
        assert place is None or token in place
        assert not token.isascii() or token.startswith(("token_id:", "bytes:")) or text[offset : offset + 1] == token
    if echo:
        own = token_log_probs(joint.base, Continuations.from_lists([prompt[:1]], [[prompt[1:]]]))
        assert lists["token_logprobs"][0] is None
        assert lists["token_logprobs"][1:start] == pytest.approx(own.log_prob[0, 0].tolist())


def test_the_likeliest_token_at_each_step(ask, joint):
    found = ask("ab", model="tiny-base", temperature=0, max_tokens=3, extra_body={"return_token_ids": True})
    tokens = joint.tokenizer.encode("ab")
    for token in found.choices[0].model_extra["token_ids"]:
        assert token == int(joint.base.next_log_probs(Sequences.from_lists([tokens]))[0].argmax())
        tokens.append(token)
    greedy = ask("ab", temperature=0, extra_body={"candidates": None})
    assert greedy.model_extra["freenergy"]["candidates"] == 1, "the others would be the same"


SAMPLERS = {
    "resampling": {"candidates": 20, "truncation.top_k": 5, "replacement": True},
    "best-of-n": {"candidates": 8, "by": "likelihood"},
    "quasi-rejection": {"distance": 0.2, "pilot": 32},
    "metropolis": {"steps": 8},
    "sequential": {"particles": 8},
    "autoregressive": {"completions": 2, "top_k": 3},
    "independence": {"steps": 5},
    "base": {},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("how", [{}, {"max_tokens": 9}], ids=["one chunk", "two chunks"])
def test_every_sampler_writes_the_library_s_text(ask, joint, name, how):
    settings = SAMPLERS[name]
    found = ask(n=2, extra_body={"candidates": None, "sampler": name, "settings": settings}, **how)
    sampler, most = sampler_named(name, settings), how.get("max_tokens", 6)
    writing = Writing(sampler=sampler, num=2, chunks=-(-most // 6), max_context=joint.max_context, max_tokens=most)
    wanted = joint.write("a bad", joint.space, stream(3), writing)
    assert [choice.text for choice in found.choices] == [text.text for text in wanted.texts]
    extra = found.model_extra["freenergy"]
    assert (extra["sampler"], extra["law"]) == (wanted.steps[0].method, wanted.steps[0].law)
    streamed = ask(n=2, extra_body={"candidates": None, "sampler": name, "settings": settings}, stream=True, **how)
    texts = ["", ""]
    for piece in streamed:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [text.text for text in wanted.texts]


def test_a_kernel_of_a_few_lines_is_served(ask, joint, monkeypatch):
    """Register a class, and every client can name it."""
    monkeypatch.setattr(KERNELS, "_classes", dict(KERNELS._classes))
    KERNELS.register("lazy", Lazy)
    found = ask(extra_body={"candidates": None, "sampler": "lazy", "settings": {"steps": 3, "stay": 0.25}})
    writing = Writing(sampler=sampler_named("lazy", {"steps": 3, "stay": 0.25}), max_context=joint.max_context)
    assert found.choices[0].text == joint.write("a bad", joint.space, stream(3), writing)[0].text


def test_samplers_are_listed_with_their_settings(server, serve, joint):
    found = {one["id"]: one["settings"] for one in httpx.get(f"{server}/v1/samplers").json()["data"]}
    assert next(iter(found)) == "resampling"
    assert "truncation.top_k" in found["resampling"]
    assert "steps" in found["metropolis"]
    with serve(ResidualModel(joint.base, no_energy, joint.tokenizer)) as (address, _):
        assert [one["id"] for one in httpx.get(f"{address}/v1/samplers").json()["data"]] == ["base"]
        body = {"model": "tiny", "prompt": "a", "max_tokens": 5}
        assert httpx.post(f"{address}/v1/completions", json=body).json()["freenergy"]["law"] == "base"
        refused = httpx.post(f"{address}/v1/completions", json=body | {"sampler": "resampling"})
        assert "needs an energy" in refused.json()["error"]["message"]


def test_a_sampler_that_nobody_waits_for_ends(serve, make_joint):
    """A chain of many steps takes one turn; it is given up when its client leaves, so that others are served."""
    slow = make_joint(energy=lambda x: time.sleep(0.02) or torch.zeros(x.shape, dtype=torch.float64))
    with serve(slow) as (address, server):
        body = {"model": "tiny", "prompt": "a", "sampler": "independence", "settings": {"steps": 4000}}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=body, timeout=0.5)
        body = {"model": "tiny", "prompt": "a", "candidates": 1}
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=20).is_success, "80 s would have been left"
        assert server.counts.cancelled == 1


def test_a_stop_string_ends_a_text(ask):
    whole = ask(n=8).choices
    text = next(choice.text for choice in whole if len(choice.text) > 3)
    stopped = ask(n=8, stop=text[2], logprobs=0).choices
    for choice, other in zip(stopped, whole, strict=True):
        assert choice.text == other.text.split(text[2])[0]
        is_stopped = text[2] in other.text
        assert choice.model_extra["stop_reason"] == (text[2] if is_stopped else None)
        assert not is_stopped or choice.finish_reason == "stop"
        assert len(choice.logprobs.tokens) >= len(choice.text)
        if is_stopped:
            assert all(place < len(choice.text) for place in choice.logprobs.text_offset)


def test_prompts_as_tokens_and_new_documents(ask):
    assert ask([97, 32, 98]).choices[0].text == ask("a b").choices[0].text
    assert ask([[97], [98]]).choices[0].text == ask("a").choices[0].text
    assert ask("").choices[0].text == ask([[]]).choices[0].text
    assert ask("").usage.prompt_tokens == 0


def test_nothing_new_but_the_prompt(ask, server):
    found = ask("abé", max_tokens=0, echo=True, logprobs=0, n=2)
    assert [choice.text for choice in found.choices] == ["abé", "abé"]
    assert found.usage.completion_tokens == 0
    assert len(found.choices[0].logprobs.token_logprobs) == 4
    streamed = list(ask("abé", max_tokens=0, echo=True, stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == "abé"
    assert streamed[-1].choices[0].finish_reason == "length"


ERRORS = {
    "no prompt of this kind": ({"prompt": [1.5]}, 400, "prompt"),
    "an unknown field": ({"colour": "red"}, 400, "colour"),
    "a number in quotes": ({"max_tokens": "5"}, 400, "max_tokens"),
    "too many texts": ({"n": 10**9, "max_tokens": 0}, 400, "n"),
    "too many candidates": ({"candidates": 10**9}, 400, None),
    "too many tokens": ({"max_tokens": 10**9}, 400, None),
    "too many prompts": ({"prompt": ["a"] * 65}, 400, "prompt"),
    "a penalty": ({"presence_penalty": 1.0}, 400, "presence_penalty"),
    "too many log-probabilities": ({"logprobs": 257, "n": 100, "max_tokens": 2000}, 400, "logprobs"),
    "more than there are tokens": ({"logprobs": 258}, 400, "logprobs"),
    "five stop strings": ({"stop": list("abcde")}, 400, "stop"),
    "an empty stop string": ({"stop": ""}, 400, "stop"),
    "no such token": ({"prompt": [300]}, 400, None),
    "a negative seed": ({"seed": -1}, 400, "seed"),
    "hot": ({"temperature": 1e9}, 400, "temperature"),
    "no such law": ({"law": "moon"}, 400, "law"),
    "candidates of the base": ({"model": "tiny-base", "candidates": 9}, 400, None),
    "no such sampler": ({"sampler": "dice"}, 400, None),
    "a class by its name": ({"sampler": "freenergy.samplers:Resampling"}, 400, None),
    "no such setting": ({"sampler": "metropolis", "settings": {"candidates": 9}}, 400, None),
    "a setting beyond the limit": ({"sampler": "metropolis", "settings": {"steps": 10**6}}, 400, None),
    "a setting of the wrong type": ({"settings": {"candidates": [9]}}, 400, "settings"),
    "a setting given twice": ({"candidates": 9, "settings": {"candidates": 8}}, 400, None),
    "a sampler of the base": ({"model": "tiny-base", "sampler": "metropolis"}, 400, None),
    "no such model": ({"model": "gpt-9"}, 404, "model"),
    "no model": ({"model": None}, 400, "model"),
}


@pytest.mark.parametrize(("fields", "status", "param"), ERRORS.values(), ids=ERRORS.keys())
def test_malformed_requests_get_the_dialect_s_error(server, fields, status, param):
    response = httpx.post(f"{server}/v1/completions", json={"model": "tiny", "prompt": "a", **fields})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"'text'",
        b"[" * 50_000,
        b"\xff\xfe",
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "seed": 1%s}' % (b"0" * 5000),
        b'{"model": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "\\ud800": 1}',
    ],
    ids=lambda content: repr(content[:40]),
)
def test_bodies_that_are_no_request(server, content):
    for path in ("/v1/completions", "/score"):
        response = httpx.post(f"{server}{path}", content=content, headers={"content-type": "application/json"})
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]


def test_the_client_s_own_errors(client, ask):
    with pytest.raises(openai.BadRequestError, match="best_of must be n"):
        ask(best_of=3)
    with pytest.raises(openai.NotFoundError, match="use tiny or tiny-base"):
        ask(model="other")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError):
        list(ask(stream=True, extra_body={"candidates": 10**6}))


def test_a_full_queue_and_a_wrong_token(serve, make_joint):
    gate = threading.Event()

    def waiting(x):
        assert gate.wait(20)
        return torch.zeros(x.shape, dtype=torch.float64)

    token = "0123456789abcdefghij"
    held = serve(make_joint(energy=waiting), queue=1, token=token)
    with held as (address, engine), client_of(address, token) as client, client_of(address, "wrong") as stranger:
        with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            stranger.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        held = threading.Thread(target=client.completions.create, kwargs={"model": "tiny", "prompt": "a"})
        held.start()
        while not len(engine.turns):
            time.sleep(0.005)
        for is_streamed in (False, True):
            with pytest.raises(openai.RateLimitError, match="the queue is full") as busy:
                client.completions.create(model="tiny", prompt="a", stream=is_streamed)
            assert int(busy.value.response.headers["retry-after"]) >= 1
            assert busy.value.body["type"] == "rate_limit_error"
        assert [model.id for model in client.models.list()] == ["tiny", "tiny-base"], "this needs no queue"
        gate.set()
        held.join()
        assert client.completions.create(model="tiny", prompt="a").choices


def test_an_answer_that_takes_too_long(serve, make_joint):
    def slow(x):
        time.sleep(0.3)
        return torch.zeros(x.shape, dtype=torch.float64)

    with serve(make_joint(energy=slow), timeout_seconds=0.1) as (address, engine):
        response = httpx.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert response.status_code == 408
        assert response.json()["error"]["type"] == "timeout_error"
        assert len(engine.turns) == 0
        assert httpx.get(f"{address}/health").json()["status"] == "ok"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_frees_its_place(serve, make_joint, is_streamed):
    gate, calls = threading.Event(), []

    def waiting(x):
        calls.append(x.shape)
        assert gate.wait(20)
        return torch.zeros(x.shape, dtype=torch.float64)

    with serve(make_joint(energy=waiting), queue=1) as (address, engine):
        body = {"model": "tiny", "prompt": "a", "candidates": 2560, "stream": is_streamed}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=body, timeout=0.3)
        deadline = time.monotonic() + 5
        while len(engine.turns):
            assert time.monotonic() < deadline, "the place was not freed"
            time.sleep(0.01)
        gate.set()
        assert httpx.post(f"{address}/v1/completions", json={**body, "candidates": 1, "stream": False}).is_success
    assert engine.counts.cancelled == 1
    assert len(calls) == 2


def test_ranking(server, joint):
    body = {"prefix": "a bad ", "candidates": ["cab", "dad", "é"], "ends": True}
    response = httpx.post(f"{server}/score", json=body)
    wanted = joint.score("a bad ", ["cab", "dad", "é"], ends=True).to_json()
    assert response.json() == json.loads(json.dumps(wanted))
    for wrong in ({"candidates": []}, {"prefix": "a"}, {"candidates": ["a"] * 5000}, {"candidates": "abc"}):
        refused = httpx.post(f"{server}/score", json=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "candidates"


def test_models_and_health(client, server):
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-base"]
    assert client.models.retrieve("tiny-base").owned_by == "freenergy"
    health = httpx.get(f"{server}/health").json()
    assert (health["status"], health["model"], health["queue"]) == ("ok", "tiny", 0)
    assert health["uptime_seconds"] >= 0


def test_a_server_without_its_thread_is_not_healthy(serve):
    with serve() as (address, engine):
        assert httpx.get(f"{address}/health").status_code == 200
        engine.close()
        response = httpx.get(f"{address}/health")
    assert (response.status_code, response.json()["status"]) == (503, "stopped")


def test_metrics(serve):
    from prometheus_client.parser import text_string_to_metric_families

    with serve() as (address, _):
        for _ in range(3):
            httpx.post(f"{address}/v1/completions", json={"model": "tiny", "candidates": 10}).raise_for_status()
        httpx.post(f"{address}/v1/completions", json={"model": "no"})
        httpx.get(f"{address}/v1/models/tiny")
        httpx.get(f"{address}/nowhere")
        text = httpx.get(f"{address}/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    requests = {
        (s.labels["route"], s.labels["status"]): s.value for s in samples if s.name == "freenergy_requests_total"
    }
    assert requests["/v1/completions", "200"] == 3
    assert requests["/v1/completions", "404"] == 1
    assert requests["/v1/models/{name:path}", "200"] == 1
    assert requests["other", "404"] == 1
    found = {s.name: s.value for s in samples if not s.labels}
    assert found["freenergy_jobs_finished_total"] == 3
    assert found["freenergy_tokens_drawn_total"] == 3 * 10 * 6
    assert found["freenergy_queue"] == 0
    assert found["freenergy_working_seconds_total"] > 0
    assert found["freenergy_batch_contexts_count"] == 3


# our own remote language model on the server


@pytest.fixture(scope="module")
def remote(server):
    return RemoteLM(url=server, model="tiny-base", vocab_size=257, eos=256, most_log_probs=20, batch=5, parallel=4)


def test_a_remote_model_scores_as_the_local_one(remote, joint):
    x = joint.base.sample(
        Sequences.from_lists([[97, 98], [], [99]]), 5, SequenceSpace(vocab_size=257, length=7, eos=256), Rng(4)
    ).x
    torch.testing.assert_close(remote.log_prob(x), joint.base.log_prob(x), atol=1e-4, rtol=0)
    contexts = Sequences.from_lists([[97], [], [0xC3, 98]])
    found = remote.next_log_probs(contexts)
    torch.testing.assert_close(found, joint.base.next_log_probs(contexts), atol=1e-4, rtol=0)


@pytest.mark.parametrize("eos", [256, None], ids=["ended", "fixed"])
@pytest.mark.parametrize(
    "truncation",
    [Truncation(), Truncation(top_k=4), Truncation(temperature=0.7, top_k=5), Truncation(top_p=0.9)],
    ids=str,
)
def test_a_remote_model_draws_from_the_local_law(remote, joint, eos, truncation):
    space = SequenceSpace(vocab_size=257, length=8, eos=eos)
    contexts = Sequences.from_lists([[97, 98], []])
    draws = remote.sample(contexts, 4, space, Rng(5), truncation)
    again = remote.sample(contexts, 4, space, Rng(5), truncation)
    assert draws.x.lists() == again.x.lists(), "the seeds of the requests decide"
    torch.testing.assert_close(draws.log_base, joint.base.log_prob(draws.x), atol=1e-4, rtol=0)
    assert len({tuple(x) for row in draws.x.lists() for x in row}) > 4
    log_q = torch.zeros_like(draws.log_proposal)
    for b, row in enumerate(draws.x.lists()):
        for n, x in enumerate(row):
            for t, token in enumerate(x):
                context = Sequences.from_lists([[*contexts.lists()[b], *x[:t]]])
                log_q[b, n] += truncation(joint.base.next_log_probs(context))[0, token]
    torch.testing.assert_close(draws.log_proposal, log_q, atol=1e-4, rtol=0)
    if eos is not None:
        assert all(x[-1] == 256 or len(x) == 8 for row in draws.x.lists() for x in row)


@pytest.mark.statistical
def test_the_remote_law_has_the_right_mean(remote, joint):
    """First tokens of 400 draws; a mean more than 5 standard errors off happens once in 1.7 million."""
    context, space = Sequences.from_lists([[97]]), SequenceSpace(vocab_size=257, length=1, eos=256)
    drawn = remote.sample(context, 400, space, Rng(6)).x.tokens.flatten()
    log_p = joint.base.next_log_probs(context)[0]
    token = int(log_p.argmax())
    p = math.exp(float(log_p[token]))
    error = math.sqrt(p * (1 - p) / 400)
    assert abs(float((drawn == token).double().mean()) - p) < 5 * error
    mutant = math.exp(0.4 * float(log_p[token]))  # of a law that is flattened
    assert abs(float((drawn == token).double().mean()) - mutant) > 5 * error


def test_the_example_of_the_docs(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    [code] = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server).replace('model="demo"', 'model="tiny"')
    exec(compile(code, "serving.md", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.split()[-1]) >= 1  # the effective sample size
