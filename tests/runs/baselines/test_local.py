"""The local counterpart of a probe against a slow reading of its formula, and a mix on top of it."""

import math

import numpy as np
import pytest
import torch

from freenergy import AdaptedLM, Continuations, LocalCounts, Rng
from freenergy.testing import check_language_model
from freenergy.training.baselines.local import LocalProbe
from freenergy.training.baselines.residual import ResidualLM
from freenergy.training.local_mix import fit_local_mix

V = 5


def windows():
    texts = [[1, 2, 3, 3, 0, 2], [4, 1, 2, 3, 1, 1], [2, 2, 0, 1, 4, 1], [3, 3, 1, 2, 3, 0]]
    return Continuations.from_lists([text[:2] for text in texts], [[text[2:]] for text in texts])


def test_probe_by_hand():
    probe = LocalProbe(layers=2, width=3, rank=2, vocab_size=V).double()
    with torch.no_grad():
        for i, weight in enumerate(probe.parameters()):
            weight.copy_(Rng(i).normal(*weight.shape))
    states, log_p = Rng(8).normal(1, 2, 3), torch.log_softmax(Rng(9).normal(1, V), -1)
    z = []
    for layer in states[0].numpy():
        z += list((layer - layer.mean()) / math.sqrt(layer.var() + 1e-5))
    p = log_p[0].exp().numpy()
    entropy = -sum(value * math.log(value) for value in p)
    A, U, (a, b) = probe.A.detach().numpy(), probe.U.detach().numpy(), probe.a_b.tolist()
    wanted = U @ (A @ np.array(z)) + (a + b * entropy / math.log(V)) * log_p[0].numpy()
    np.testing.assert_allclose(probe.f(states, log_p)[0].detach().numpy(), wanted, atol=1e-12)


def test_a_mix_on_top_of_a_probe(make_model, stream, tmp_path):
    """It is a language model, fitted to what the probe leaves, and comes back from disk."""
    below = make_model("probe")
    for part in below.corrections:
        part.requires_grad_(False)
    counts = LocalCounts.of(stream, vocab_size=V, eos=0, order=3)
    fit = fit_local_mix(below, counts, ["log p", "order 1", "order 2", "log(1 + count)"], windows(), l2=1e-3)
    assert fit.nats_before == pytest.approx(-below.log_prob(windows()).sum().item() / 16, abs=1e-6)
    assert fit.nats_fitted < fit.nats_before
    model = AdaptedLM(below, fit.weights, counts)
    assert fit.nats_fitted == pytest.approx(-model.log_prob(windows()).sum().item() / 16, abs=1e-6)
    check_language_model(model, contexts=[[1, 2, 3], []], length=2, tolerance=2e-6)
    (probe,) = below.corrections
    probe.save(tmp_path / "probe.safetensors")
    model.save_mix(tmp_path / "ngram")
    under = ResidualLM(below.base, [LocalProbe.open(tmp_path / "probe.safetensors")], layers=(1, 2))
    again = AdaptedLM.on(under, tmp_path / "ngram")
    assert torch.equal(again.log_prob(windows()), model.log_prob(windows()))
