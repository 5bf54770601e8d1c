"""Every public language model keeps the contract of its role: one row each."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import tokenizers
import torch

import freenergy
from freenergy import HuggingFaceLM, NgramLM, Rng, Sequences, SequenceSpace, TabularLM, Truncation
from freenergy.core.errors import UserError
from freenergy.core.roles import LanguageModel
from freenergy.core.truncation import ANCESTRAL
from freenergy.corpus import Tokenizer
from freenergy.lm.adapted import AdaptedLM
from freenergy.lm.load import LANGUAGE_MODELS, load_lm, save_lm
from freenergy.lm.local_counts import LocalCounts
from freenergy.testing import check_language_model
from freenergy.testing.networks import tiny_network

CONTEXTS = [[1, 2, 3, 1, 2], [3], [], [2, 0, 1]]
V = 4


def ngram():
    stream = np.array([1, 2, 3, 0, 1, 2, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0] * 3)
    return NgramLM.fit(stream, vocab_size=V, eos=0, order=3)


def adapted():
    """A mix on a network; its contract, which takes longer, is in tests/runs/lm/test_adapted.py."""
    counts = LocalCounts.of(np.array([1, 2, 3, 0, 1, 2, 1, 0] * 2), vocab_size=V, eos=0, order=2)
    return AdaptedLM(tiny_network("GPTNeoX"), {"log p": -0.2, "order 2": 0.5, "log(1 + count) · idf": 0.7}, counts)


ROWS = {
    "tabular": (TabularLM, lambda: TabularLM.random(Rng(2), vocab_size=V, order=2), 1e-12),
    "tabular, order 0": (TabularLM, lambda: TabularLM.random(Rng(2), vocab_size=V, order=0), 1e-12),
    "ngram": (NgramLM, ngram, 1e-12),
    "gpt2": (HuggingFaceLM, lambda: tiny_network("GPT2"), 1e-6),
    "llama": (HuggingFaceLM, lambda: tiny_network("Llama"), 1e-6),
    "gpt2, compiled": (HuggingFaceLM, lambda: tiny_network("GPT2", fused=True), 1e-6),
    "gpt-neox": (HuggingFaceLM, lambda: tiny_network("GPTNeoX"), 1e-6),
    "mistral": (HuggingFaceLM, lambda: tiny_network("Mistral"), 1e-6),
    "mamba": (HuggingFaceLM, lambda: tiny_network("Mamba"), 1e-6),
}
SHARED = {"gpt2", "gpt2, compiled", "llama", "gpt-neox", "mistral"}


@pytest.mark.parametrize("name", ROWS)
def test_contract(name):
    _, make, tolerance = ROWS[name]
    check_language_model(make(), contexts=CONTEXTS, length=2, tolerance=tolerance)


@pytest.mark.parametrize("name", ROWS)
def test_shares_the_prefix_where_it_should(name):
    kind, make, _ = ROWS[name]
    if kind is HuggingFaceLM:
        assert make().shares_prefix == (name in SHARED)


def test_every_public_language_model_has_a_row():
    public = {getattr(freenergy, name) for name in freenergy.__all__ if name.endswith("LM")}
    # tests/runs/lm runs the contracts of three: with a server, slower, and without probabilities; the last is an energy
    elsewhere = {freenergy.RemoteLM, AdaptedLM, freenergy.SamplesLM, freenergy.SecondLM}
    assert public - elsewhere == {row[0] for row in ROWS.values()}


def tokenizer():
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")
    return Tokenizer(tokenizers.Tokenizer(words), eos=0)


@pytest.mark.parametrize("kind", [kind for kind in LANGUAGE_MODELS if kind != "samples"])  # see tests/runs/lm
def test_every_registered_language_model_comes_back_from_disk(kind, tmp_path):
    """A served one comes back with its address and no key; it draws by a seed, and all others from the ``Rng``."""
    served = freenergy.RemoteLM(url="http://127.0.0.1:9/v1", vocab_size=V, eos=0, stops=(2,), api_key="secret")
    kinds = {
        "ngram": ngram,
        "huggingface": lambda: tiny_network("GPTNeoX"),
        "remote": lambda: served,
        "adapted": adapted,
    }
    lm = kinds[kind]()
    save_lm(lm, tmp_path)
    again = load_lm(tmp_path, tokenizer())
    assert type(again) is LANGUAGE_MODELS.find(kind) is type(lm)
    assert lm.draws_here == (kind != "remote")
    if kind == "remote":
        assert (again.url, again.stops, again.api_key) == (lm.url, (2,), None)
        assert "secret" not in (tmp_path / "base.json").read_text()
    else:
        contexts = Sequences.from_lists(CONTEXTS)
        assert torch.equal(again.next_log_probs(contexts), lm.next_log_probs(contexts))


@pytest.mark.parametrize(
    ("record", "words"), [({}, "kind None"), ({"kind": "no"}, "kind 'no'"), ({"kind": "ngram"}, "path")]
)
def test_a_record_that_says_too_little_is_one_sentence(record, words, tmp_path):
    (tmp_path / "base.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"base.json .*{words}: run the base stage again"):
        load_lm(tmp_path, tokenizer())


@dataclass
class Wrong:
    """A language model with one fault, for the contract to find."""

    fault: str
    inner: LanguageModel = None

    def __post_init__(self):
        self.inner = TabularLM.random(Rng(2), vocab_size=V, order=2)
        self.vocab_size, self.eos, self.max_length, self.draws_here = V, 0, None, True

    def log_prob(self, x):
        value = self.inner.log_prob(x)
        if self.fault == "not normalised":
            return value + 0.01 * (x.lengths > 0)
        if self.fault == "batch":
            return value + 0.01 * (x.shape[0] - 1) * (x.lengths > 0)
        if self.fault == "padding":
            return value - 1e-3 * (x.tokens * ~x.mask).sum(-1)
        return value

    def next_log_probs(self, contexts):
        value = self.inner.next_log_probs(contexts)
        return value.flip(-1) if self.fault == "next" else value

    def sample(self, contexts, num, space, rng, truncation=ANCESTRAL):
        if self.fault == "law":  # a little too cold, and it does not say so
            truth = self.inner.sample(contexts, num, space, rng, Truncation(temperature=0.98))
            return freenergy.Draws(truth.x, truth.log_base, truth.log_base)
        if self.fault == "truncation" and truncation.top_k:
            return self.inner.sample(contexts, num, space, rng, ANCESTRAL)
        if self.fault == "seed":
            return self.inner.sample(contexts, num, space, Rng(id(rng) % 1009), truncation)
        return self.inner.sample(contexts, num, space, rng, truncation)


FAULTS = ["not normalised", "batch", "padding", "next", "law", "truncation", "seed"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_finds_a_mutant(fault):
    check_language_model(Wrong("none"), contexts=CONTEXTS, tolerance=1e-12)
    with pytest.raises(AssertionError):
        check_language_model(Wrong(fault), contexts=CONTEXTS, tolerance=1e-12)


def test_truncation_against_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(200):
        p = rng.dirichlet(np.ones(6) * 0.7)
        k, top_p, temperature = int(rng.integers(1, 7)), float(rng.uniform(0.05, 1)), float(rng.uniform(0.3, 2))
        tempered = p ** (1 / temperature)
        order = np.argsort(-tempered)[:k]
        kept, mass = [], 0.0
        share = tempered[order] / tempered[order].sum()
        for token, value in zip(order, share, strict=True):
            if mass >= top_p:
                break
            kept.append(token)
            mass += value
        wanted = np.zeros(6)
        wanted[kept] = tempered[kept] / tempered[kept].sum()
        truncation = Truncation(top_k=k, top_p=top_p, temperature=temperature)
        found = truncation(torch.tensor(p).log()).exp().numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_ties_keep_exactly_k():
    q = Truncation(top_k=2)(torch.zeros(5, dtype=torch.float64).log_softmax(-1)).exp()
    assert int((q > 0).sum()) == 2
    assert math.isclose(float(q.max()), 0.5)


def test_sampling_in_chunks_changes_no_token():
    lm = tiny_network("GPT2")
    space, contexts = SequenceSpace(vocab_size=V, length=5), Sequences.from_lists(CONTEXTS)
    whole = lm.sample(contexts, 7, space, Rng(3))
    from freenergy.lm import huggingface

    before = huggingface._ROWS
    try:
        huggingface._ROWS = 3
        parts = lm.sample(contexts, 7, space, Rng(3))
    finally:
        huggingface._ROWS = before
    assert torch.equal(whole.x.tokens, parts.x.tokens)
    torch.testing.assert_close(whole.log_base, parts.log_base, atol=1e-5, rtol=0)
