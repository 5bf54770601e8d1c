"""Traces: the same numbers as a plain forward pass over each string, read or collected while sampling."""

import math

import pytest
import torch

from freenergy import Continuations, Rng, Sequences, SequenceSpace, Truncation
from freenergy.lm import huggingface
from freenergy.lm.activations import TracingLM
from freenergy.lm.decoding import load
from freenergy.testing.networks import tiny_network

V = 7
CONTEXTS = [[1, 2, 3, 1, 2], [3], [], [2, 0, 1]]
LAYERS = (0, 1, 2)


MODELS = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "mamba": "Mamba"}


def slow(lm, context, x, after=False):
    """One string, one forward pass, one place at a time."""
    context = context or [lm.eos]
    with torch.no_grad():
        out = lm.model(torch.tensor([context + x]), output_hidden_states=True, use_cache=False)
    log_probs, at = out.logits[0].double().log_softmax(-1), range(len(context) - 1, len(context) + len(x) - 1)
    rows = []
    for place, token in zip(at, x, strict=True):
        p = [float(value) for value in log_probs[place].exp()]
        rank = sorted(p, reverse=True).index(p[token]) + 1
        rows.append((math.log(p[token]), -sum(q * math.log(q) for q in p), math.log(rank)))
    seen = [place + after for place in at]
    states = torch.stack([out.hidden_states[k][0, seen].double().mean(0) for k in LAYERS])
    return torch.tensor(rows, dtype=torch.float64), states


def some():
    rows = [[[(3 * b + 2 * n + t + 1) % V for t in range(n + 1)] for n in range(4)] for b in range(len(CONTEXTS))]
    return Continuations.from_lists(CONTEXTS, rows)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("after", [False, True])
def test_reading_agrees_with_a_plain_forward_pass(name, after, monkeypatch):
    lm, x = tiny_network(MODELS[name], vocab_size=V), some()
    assert isinstance(lm, TracingLM)
    traces = [lm.trace(x, LAYERS, after=after)]
    monkeypatch.setattr(huggingface, "_LOGITS", 4 * V * 4 * 3)  # a few rows at a time
    traces.append(lm.trace(x, LAYERS, after=after))
    for trace in traces:
        assert torch.equal(trace.mask, x.mask)
        for b, context in enumerate(CONTEXTS):
            for n, tokens in enumerate(x.lists()[b]):
                rows, states = slow(lm, context, tokens, after)
                found = torch.stack([trace.log_p[b, n], trace.entropy[b, n], trace.log_rank[b, n]], dim=-1)
                torch.testing.assert_close(found[: len(tokens)], rows, atol=1e-5, rtol=0)
                assert (found[len(tokens) :] == 0).all()
                torch.testing.assert_close(trace.states[b, n], states, atol=1e-5, rtol=0)
        torch.testing.assert_close(trace.log_p.sum(-1), lm.log_prob(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize(("truncation", "after"), [(Truncation(), False), (Truncation(top_k=3), True)])
def test_sampling_collects_what_reading_finds(name, eos, truncation, after, monkeypatch):
    monkeypatch.setattr(huggingface, "_ROWS", 5)
    monkeypatch.setattr(load, "_ROWS", 5)
    lm, contexts = tiny_network(MODELS[name], vocab_size=V), Sequences.from_lists(CONTEXTS)
    space = SequenceSpace(vocab_size=V, length=6, eos=eos)
    for num in (2, 7):
        draws, trace = lm.sample_traced(contexts, num, space, Rng(4), truncation, LAYERS, after=after)
        plain = lm.sample(contexts, num, space, Rng(4), truncation)
        assert torch.equal(draws.x.tokens, plain.x.tokens)
        torch.testing.assert_close(draws.log_base, plain.log_base, atol=1e-5, rtol=0)
        torch.testing.assert_close(draws.log_proposal, plain.log_proposal, atol=1e-5, rtol=0)
        read = lm.trace(draws.x, LAYERS, after=after)
        assert torch.equal(trace.mask, draws.x.mask)
        for field in ("states", "log_p", "entropy", "log_rank"):
            torch.testing.assert_close(getattr(trace, field), getattr(read, field), atol=1e-4, rtol=0)
    if eos is not None:
        assert (draws.x.lengths < 6).any()


def test_a_trace_of_no_layers_and_of_no_tokens():
    lm = tiny_network("GPT2", vocab_size=V)
    trace = lm.trace(some(), ())
    assert trace.states.shape[2] == 0
    assert torch.equal(trace.log_p, lm.trace(some(), LAYERS).log_p)
    empty = lm.trace(Continuations.from_lists([[1], [2]], [[[]], [[]]]), LAYERS)
    assert not empty.mask.any()
    assert empty.states.shape == (2, 1, 3, 16)
