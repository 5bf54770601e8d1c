"""Bounded requests: one small request neither takes the memory nor the turns of others, and ends with its client."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import psutil
import pytest
import torch

from byte_server import byte_energy, byte_tokenizer
from freenergy import NgramLM, ResidualModel, SequenceSpace
from freenergy.samplers import Metropolis
from freenergy.text.scoring import length_batches
from freenergy.web.model_server import ModelServer
from freenergy.web.settings import Limits

CHAIN = {"model": "tiny", "prompt": "a", "sampler": "metropolis"}
SMALL = {"model": "tiny", "prompt": "a", "candidates": 4, "seed": 1}


@pytest.fixture(scope="module")
def counted():
    """A base of counts, which reads strings of any length."""
    stream = np.random.default_rng(1).integers(97, 105, 4000)
    lm = NgramLM.fit(np.append(stream, 256), vocab_size=257, eos=256, order=3)
    return ResidualModel(lm, byte_energy, byte_tokenizer(), space=SequenceSpace(vocab_size=257, length=6))


def slow(seconds):
    """An energy that takes some time for each call."""

    def energy(x):
        time.sleep(seconds)
        return torch.zeros(x.shape, dtype=torch.float64)

    return energy


# memory


def test_one_long_candidate_does_not_pad_all_others(counted):
    """The attack D1: 2000 short texts and one of 40,000 tokens; all in one array would be 80 million cells."""
    short = ["abc" + "defgh"[i % 5] * (i % 4) for i in range(2000)]
    texts, seen = [*short, "ab" * 20_000], []

    def watched(x):
        seen.append(x.tokens.numel())
        return byte_energy(x)

    model = ResidualModel(counted.base, watched, counted.tokenizer, space=counted.space)
    before = psutil.Process().memory_info().rss
    found = model.score("The ", texts)
    assert psutil.Process().memory_info().rss - before < 200e6
    assert max(seen) == 40_000, "the long one by itself"
    alone = counted.score("The ", texts[:5])
    assert [one.log_score for one in found.candidates[:5]] == [one.log_score for one in alone.candidates]
    assert sum(one.share for one in found.candidates) == pytest.approx(1)


def test_batches_hold_every_text_once_and_fit():
    rng = np.random.default_rng(3)
    for context, cells in ((0, 50), (1000, 4096), (100_000, 4096)):
        lengths = rng.integers(1, 60, 700).tolist()
        batches = length_batches(lengths, context, cells)
        assert sorted(i for batch in batches for i in batch) == list(range(700))
        for batch in batches:
            longest = max(lengths[i] for i in batch)
            assert len(batch) == 1 or (len(batch) <= 256 and len(batch) * longest <= cells)
    assert length_batches([3, 1, 2], 0, 100) == [[0, 1, 2]], "what fits is read as it stands"


def test_a_list_beyond_the_limits_is_refused_by_its_size(serve, counted):
    with serve(counted) as (address, engine):
        many = httpx.post(f"{address}/score", json={"prefix": "", "candidates": ["ab" * 20_000, "cd" * 20_000]})
        far = httpx.post(f"{address}/score", json={"prefix": "a" * 8000, "candidates": ["b"] * 600})
        fine = httpx.post(f"{address}/score", json={"prefix": "", "candidates": ["ab" * 20_000, "cd"]}, timeout=30)
        assert len(engine.turns) == 0
    assert (many.status_code, far.status_code, fine.status_code) == (400, 400, 200)
    assert "80000 tokens: give at most 65536 in all" in many.json()["error"]["message"]
    assert "characters to be encoded" in far.json()["error"]["message"]


def test_a_text_has_a_limit_on_the_tokens_of_its_candidates(serve):
    with serve(draw_tokens=1000) as (address, _):
        wide = httpx.post(f"{address}/v1/completions", json={**SMALL, "candidates": 200, "max_tokens": 12})
        fine = httpx.post(f"{address}/v1/completions", json={**SMALL, "candidates": 20, "max_tokens": 12})
    assert (wide.status_code, fine.status_code) == (400, 200)
    assert "this server draws at most 1000" in wide.json()["error"]["message"]


# turns


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"prefix": "a", "candidates": [f"{i:b}" for i in range(400)]}),
        ("/playground/rising", {"prefix": "a", "text": "ab" * 200}),
        (
            "/v1/completions",
            {**CHAIN, "settings": {"steps": 60, "batch_size": 4}},
        ),
    ],
)
def test_small_requests_take_turns_with_a_large_one(serve, make_joint, path, body):
    """D2: each call of the energy takes 10 ms, the large request 0.1 seconds or more; the small ones are done first."""
    with serve(make_joint(energy=slow(0.01)), least_rows=4, cells=64) as (address, engine):

        async def race():
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                large = asyncio.create_task(client.post(path, json=body))
                while not len(engine.turns):
                    await asyncio.sleep(0.001)
                latencies = []
                while not large.done():
                    start = time.monotonic()
                    small = await client.post("/v1/completions", json=SMALL)
                    latencies.append((time.monotonic() - start, large.done()))
                    assert small.status_code == 200
                return latencies, await large

        latencies, answer = asyncio.run(race())
    assert answer.status_code == 200, answer.text
    inside = [seconds for seconds, is_after in latencies if not is_after]
    assert len(inside) >= 2, "small requests are answered while the large one is in progress"


def _model_threads():
    return sum(thread.name == "freenergy-model" for thread in threading.enumerate())


@pytest.mark.parametrize("path", ["/score", "/v1/completions"])
def test_work_ends_with_its_client(serve, make_joint, path):
    """The client leaves after 0.3 seconds of a request that would take 20; the next one does not wait for it."""
    calls = []

    def counting(x):
        calls.append(len(x.lists()[0]))
        time.sleep(0.02)
        return torch.zeros(x.shape, dtype=torch.float64)

    bodies = {
        "/score": {"prefix": "a", "candidates": [f"{i:b}" for i in range(1000, 3000)]},
        "/v1/completions": {
            "model": "tiny",
            "prompt": "a",
            "sampler": "metropolis",
            "settings": {"steps": 1000, "batch_size": 4},
        },
    }
    others = _model_threads()
    with serve(make_joint(energy=counting), cells=32) as (address, engine):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}{path}", json=bodies[path], timeout=0.3)
        start = time.monotonic()
        assert httpx.post(f"{address}/v1/completions", json=SMALL, timeout=20).status_code == 200
        assert time.monotonic() - start < 2
        number = len(calls)
        time.sleep(0.3)
        assert len(calls) == number, "nobody works for a client that left"
        assert len(engine.turns) == 0
        assert _model_threads() <= others + 1, "its thread has ended"


def test_work_ends_when_its_time_is_up(serve, make_joint):
    with serve(make_joint(energy=slow(0.02)), cells=32, timeout_seconds=0.5) as (address, _):
        body = {"prefix": "a", "candidates": [f"{i:b}" for i in range(1000, 3000)]}
        assert httpx.post(f"{address}/score", json=body, timeout=20).status_code == 408
        assert httpx.post(f"{address}/v1/completions", json=SMALL, timeout=20).status_code == 200


def test_sliced_answers_are_those_of_the_library(joint):
    """Pauses change nothing: a chain whose slices are as short as can be."""
    engine = ModelServer(joint, Limits())
    engine.start()
    request = engine.request("ab", sampler=Metropolis(steps=50), num=2, seed=3)

    async def one():
        others = [engine.call(lambda progress: json.dumps({})) for _ in range(5)]
        events = [event async for event in engine.write_all([request])[0]]
        await asyncio.gather(*others)
        return events[-1].texts

    found = asyncio.run(one())
    engine.close()
    wanted = joint.sample("ab", sampler=Metropolis(steps=50), n=2, seed=3)
    assert [text.tokens for text in found.texts] == [text.tokens for text in wanted.texts]
