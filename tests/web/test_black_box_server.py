"""The proxy: n texts of a base that only samples, resampled by energy, in the dialect of OpenAI."""

import httpx
import pytest

from freenergy import ResidualModel, SamplesLM, SequenceSpace
from freenergy.lm.sources.function import FromFunction

LENGTH = 8


def write(prefix, seed):
    """A few letters, which depend on prefix and seed."""
    return "".join(chr(ord("a") + (seed // 7**i + len(prefix)) % 6) for i in range(1 + seed % 6))


@pytest.fixture(scope="module")
def box(joint):
    """Another base for the residual model of bytes."""
    lm = SamplesLM(source=FromFunction(write, "write"), tokenizer=joint.tokenizer)
    space = SequenceSpace(vocab_size=lm.vocab_size, length=LENGTH, eos=lm.eos)
    return ResidualModel(lm, joint.energy, joint.tokenizer, space=space, max_context=8)


@pytest.fixture(scope="module")
def address(serve, box):
    with serve(box) as (address, _):
        yield address


def test_texts_of_the_server_are_those_of_the_library(address, box):
    body = {"model": "tiny", "prompt": "ab", "n": 3, "seed": 7, "candidates": 20}
    found = httpx.post(f"{address}/v1/completions", json=body, timeout=30).json()
    own = box.sample("ab", n=3, candidates=20, seed=7)
    assert [choice["text"] for choice in found["choices"]] == [text.text for text in own.texts]
    assert {choice["freenergy"]["log_base"] for choice in found["choices"]} == {None}
    plain = httpx.post(f"{address}/v1/completions", json={**body, "model": "tiny-base", "candidates": None}, timeout=30)
    assert plain.status_code == 200, plain.text


def test_what_needs_probabilities_is_one_sentence(address):
    for knob in ({"logprobs": 2}, {"temperature": 0.5}, {"sampler": "autoregressive"}):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "seed": 1, **knob}
        found = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
        assert found.status_code == 400, found.text
        assert "probabilities" in found.json()["error"]["message"]


def test_ranking_is_by_energy(address):
    body = {"prefix": "ab", "candidates": ["cab", "fed"], "ends": True}
    found = httpx.post(f"{address}/score", json=body, timeout=30).json()
    assert {row["log_base"] for row in found["candidates"]} == {None}
    energies = [row["energy"] for row in found["candidates"]]
    assert found["best"] == body["candidates"][energies.index(min(energies))]
