"""The local mix is a language model: it sums to one, its sparse terms are the dense ones, and it draws its own law."""

import math

import numpy as np
import pytest
import torch

from freenergy import NgramLM, Rng, Sequences, SequenceSpace, TabularLM, Truncation
from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations
from freenergy.lm.activations import NetworkLM, TracingLM
from freenergy.lm.adapted import AdaptedLM, weight_names
from freenergy.lm.local_counts import LocalCounts
from freenergy.lm.stepping import begin
from freenergy.testing import check_language_model
from freenergy.testing.networks import tiny_network

V, EOS = 4, 0
STREAM = np.array([1, 2, 3, 0, 1, 2, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0, 3, 1, 2, 2, 3, 1, 0] * 2)
CONTEXTS = [[1, 2, 3, 1, 2], [3], [], [2, 0, 1], [1, 2, 1, 2, 1, 2, 1]]
NAMES = weight_names(order=3, cache=True, copy=True, entropy=True)


def counts(order=3):
    return LocalCounts.of(STREAM, vocab_size=V, eos=EOS, order=order)


def weights(seed=0, entropy=True):
    """Far enough from 0 that a wrong sign or a term that is left out shows."""
    drawn = 0.6 * Rng(seed).normal(len(NAMES))
    return {name: float(w) for name, w in zip(NAMES, drawn, strict=True) if entropy or name != NAMES[1]}


def dense_terms(lm, context):
    """Every term of one context at every token, from the definition: no sparse tables, no state."""
    h = context or [EOS]
    log_p = lm.base.next_log_probs(Sequences.from_lists([h]))[0].double()
    entropy = -(log_p.exp() * log_p).sum() / math.log(V)
    found = {"log p": log_p, "entropy · log p": entropy * log_p}
    counted = lm.counts.ngrams.counts
    whole = NgramLM(counted)
    for k in range(1, counted.order + 1):
        found[f"order {k}"] = torch.from_numpy(_log_p_of_order(whole, h, k))
    for k in range(counted.order, 1, -1):  # differences of successive orders
        found[f"order {k}"] = found[f"order {k}"] - found[f"order {k - 1}"]
    c = torch.bincount(torch.tensor(h), minlength=V).double()
    documents = np.split(STREAM, np.flatnonzero(STREAM == EOS) + 1)[:-1]
    having = torch.tensor([sum(v in document for document in documents) for v in range(V)]).double()
    idf = ((1 + len(documents)) / (1 + having)).log() / math.log(1 + len(documents))
    after = torch.tensor([any(h[i] == h[-1] and h[i + 1] == v for i in range(len(h) - 1)) for v in range(V)]).double()
    two = [any(h[i - 1 : i + 1] == h[-2:] and h[i + 1] == v for i in range(1, len(h) - 1)) for v in range(V)]
    found |= {"in the context": (c > 0).double(), "in the context · idf": (c > 0) * idf}
    found |= {"log(1 + count)": c.log1p(), "log(1 + count) · idf": c.log1p() * idf}
    found |= {"followed the last token": after, "followed the last token · idf": after * idf}
    found |= {"followed the last two tokens": torch.tensor(two).double()}
    return found


def _log_p_of_order(lm, h, k):
    """p_k of the nested model, by its recursion."""
    p = np.full(V, 1 / V)
    for table, (context, _) in zip(lm.tables[:k], lm.counts.walk(lm._tail(Sequences.from_lists([h]))), strict=False):
        nodes = table.children(context[:, -1])[1]
        p = p * table.rest[context[0, -1]]
        p[table.keys[nodes] % V] += table.direct[nodes]
    return np.log(p)


def reference(lm, context):
    terms = dense_terms(lm, context)
    score = terms["log p"] + sum(w * terms[name] for name, w in lm.weights.items())
    return score - score.logsumexp(0)


BASES = {
    "tabular": (lambda: TabularLM.random(Rng(2), vocab_size=V, order=2), 1e-12),
    "ngram": (lambda: counts().ngrams, 1e-12),
    "gpt2, fast steps": (lambda: tiny_network("GPT2"), 1e-6),
    "llama, compiled": (lambda: tiny_network("Llama", fused=True), 1e-6),
    "mamba, whole strings": (lambda: tiny_network("Mamba"), 1e-6),
}


@pytest.mark.parametrize("name", BASES)
def test_contract(name):
    make, tolerance = BASES[name]
    check_language_model(AdaptedLM(make(), weights(), counts()), contexts=CONTEXTS[:4], tolerance=2 * tolerance)


@pytest.mark.parametrize("left_out", [None, *NAMES])
def test_sparse_terms_are_the_dense_ones(left_out):
    chosen = {name: w for name, w in weights(3).items() if name != left_out}
    lm = AdaptedLM(TabularLM.random(Rng(2), vocab_size=V, order=2), chosen, counts())
    found = lm.next_log_probs(Sequences.from_lists(CONTEXTS))
    for row, context in zip(found, CONTEXTS, strict=True):
        torch.testing.assert_close(row, reference(lm, context), rtol=0, atol=1e-12)


def test_every_weight_changes_the_law():
    base = TabularLM.random(Rng(2), vocab_size=V, order=2)
    for name in NAMES:
        lm = AdaptedLM(base, {name: 0.5}, counts())
        contexts = Sequences.from_lists([[1, 2, 3, 1, 2]])
        assert (lm.next_log_probs(contexts) - base.next_log_probs(contexts)).abs().max() > 1e-3, name


def test_the_ngram_model_is_one_of_the_mixes():
    mix = {"log p": -1.0, "order 1": 1.0, "order 2": 1.0, "order 3": 1.0}
    lm = AdaptedLM(TabularLM.random(Rng(2), vocab_size=V, order=2), mix, counts())
    found, wanted = (law.next_log_probs(Sequences.from_lists(CONTEXTS)) for law in (lm, counts().ngrams))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2, fast steps", "llama, compiled", "mamba, whole strings"])
def test_a_trace_is_of_the_adapted_law(name):
    """Log-probabilities, entropies and ranks are those of the mix, while it draws and afterwards; states the base's."""
    lm = AdaptedLM(BASES[name][0](), weights(), counts())
    assert isinstance(lm, TracingLM)
    assert isinstance(lm, NetworkLM)
    space = SequenceSpace(vocab_size=V, length=4, eos=EOS)
    draws, seen = lm.sample_traced(Sequences.from_lists(CONTEXTS), 40, space, Rng(5), layers=(0, 2))
    plain = lm.sample(Sequences.from_lists(CONTEXTS), 40, space, Rng(5))
    assert torch.equal(draws.x.tokens, plain.x.tokens)
    again, states = lm.trace(draws.x, (0, 2)), lm.base.trace(draws.x, (0, 2)).states
    torch.testing.assert_close(seen.states, again.states, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.states, states, rtol=0, atol=1e-5)
    for column in ("log_p", "entropy", "log_rank"):
        torch.testing.assert_close(getattr(seen, column), getattr(again, column), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.log_p.sum(-1), lm.log_prob(draws.x), rtol=0, atol=1e-5)
    b, n, t = 0, 3, 1
    law = lm.next_log_probs(Sequences.from_lists([CONTEXTS[b] + draws.x.lists()[b][n][:t]]))[0]
    assert math.isclose(float(seen.entropy[b, n, t]), -float((law.exp() * law).sum()), abs_tol=1e-5)


def test_the_batch_size_changes_no_token():
    lm = AdaptedLM(tiny_network("GPT2"), weights(), counts())
    space, contexts = SequenceSpace(vocab_size=V, length=6), Sequences.from_lists(CONTEXTS)
    whole = lm.sample(contexts, 130, space, Rng(3))
    for b, n in ((0, 0), (2, 64), (4, 129)):
        alone = lm.sample(contexts[b : b + 1], 1, space, Rng(3).shift(contexts=b, candidates=n))
        assert torch.equal(alone.x.tokens[0, 0], whole.x.tokens[b, n])


@pytest.mark.parametrize("name", BASES)
def test_candidates_take_each_others_place(name):
    lm = AdaptedLM(BASES[name][0](), weights(), counts())
    contexts = Sequences.from_lists(CONTEXTS[:2])
    stepper = begin(lm, contexts, 3, 4)
    stepper.first()
    stepper.step(torch.tensor([[1, 2, 3], [3, 0, 1]]))
    stepper.select(torch.tensor([[2, 2, 0], [1, 0, 2]]))
    found = stepper.step(torch.tensor([[1, 2, 2], [1, 1, 3]]))
    read = [[[3, 1], [3, 2], [1, 2]], [[0, 1], [3, 1], [1, 3]]]
    whole = [context + x for context, rows in zip(CONTEXTS[:2], read, strict=True) for x in rows]
    wanted = lm.next_log_probs(Sequences.from_lists(whole)).view(2, 3, V)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)


def test_without_a_network_nothing_is_shown():
    assert not isinstance(AdaptedLM(counts().ngrams, weights(), counts()), TracingLM)


def test_a_wrong_mix_is_one_sentence():
    with pytest.raises(UserError, match="no weight 'order 9'"):
        AdaptedLM(counts().ngrams, {"order 9": 1.0}, counts())
    with pytest.raises(UserError, match="4 tokens and the base has 5"):
        AdaptedLM(TabularLM.random(Rng(0), vocab_size=5, order=1), {}, counts())


def test_truncation_is_of_the_mix():
    lm = AdaptedLM(tiny_network("GPT2"), weights(), counts())
    draws = lm.sample(
        Sequences.from_lists(CONTEXTS), 8, SequenceSpace(vocab_size=V, length=3), Rng(1), Truncation(top_k=1)
    )
    x = Continuations(draws.x.contexts, draws.x.tokens[:, :, :1], torch.ones(draws.x.shape, dtype=torch.long))
    best = lm.next_log_probs(Sequences.from_lists(CONTEXTS)).argmax(-1)
    assert torch.equal(x.tokens[:, 0, 0], best)
