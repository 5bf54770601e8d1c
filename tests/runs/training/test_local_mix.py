"""The weights of a local mix: slope and curvature against finite differences, and a maximum that is one."""

import numpy as np
import pytest
import torch

from freenergy import Rng, Sequences, TabularLM
from freenergy.core.sequences import Continuations
from freenergy.lm.adapted import AdaptedLM, weight_names
from freenergy.lm.local_counts import LocalCounts
from freenergy.testing.networks import tiny_network
from freenergy.training.local_mix import LocalProblem, fit_local_mix

V, EOS = 4, 0
STREAM = np.array([1, 2, 3, 0, 1, 2, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0, 3, 1, 2, 2, 3, 1, 0] * 2)
X = Continuations.from_lists(
    [[1, 2, 3, 1, 2], [3], [], [2, 0, 1], [1, 2, 1, 2, 1, 2, 1]],
    [[[1, 2, 3]], [[2]], [[1, 1, 2]], [[3, 0]], [[2, 1, 2]]],
)
CHOICES = [
    dict(order=3, cache=True, copy=True, entropy=True),
    dict(order=1, cache=True, copy=False, entropy=False),
    dict(order=0, cache=False, copy=True, entropy=True),
    dict(order=0, cache=False, copy=False, entropy=False),
]


def counts(order):
    return LocalCounts.of(STREAM, vocab_size=V, eos=EOS, order=order)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("base", [TabularLM.random(Rng(2), vocab_size=V, order=2), tiny_network("GPT2")])
def test_value_slope_and_curvature(base, choice):
    names, counted, l2 = weight_names(**choice), counts(choice["order"]), 0.01
    problem = LocalProblem(base, counted, names, X, l2=l2)
    w = 0.5 * Rng(4).normal(len(names)).numpy()
    value, slope = problem.value_and_slope(w)
    lm = AdaptedLM(base, dict(zip(names, w.tolist(), strict=True)), counted)
    wanted = -lm.log_prob(X).sum().item() / X.lengths.sum().item() + l2 * w @ w / 2
    assert value == pytest.approx(wanted, abs=1e-12 if isinstance(base, TabularLM) else 1e-6)
    step = 1e-5 * np.eye(len(w))
    sides = [(problem.value_and_slope(w + e), problem.value_and_slope(w - e)) for e in step]
    np.testing.assert_allclose(slope, [(a[0] - b[0]) / 2e-5 for a, b in sides], atol=1e-8)
    np.testing.assert_allclose(problem.curvature(w), [(a[1] - b[1]) / 2e-5 for a, b in sides], atol=1e-8)


def test_the_fit_is_the_maximum():
    base, counted = TabularLM.random(Rng(2), vocab_size=V, order=2), counts(3)
    names = weight_names(**CHOICES[0])
    fit = fit_local_mix(base, counted, names, X, l2=0.05)
    assert fit.has_converged
    assert fit.places == int(X.lengths.sum())
    assert fit.nats_fitted < fit.nats_before

    def objective(weights):
        nats = -AdaptedLM(base, weights, counted).log_prob(X).sum().item() / fit.places
        return nats + 0.05 * sum(w * w for w in weights.values()) / 2

    best = objective(fit.weights)
    for name in names:
        for change in (-0.01, 0.01):
            assert objective(fit.weights | {name: fit.weights[name] + change}) > best


def test_it_finds_the_mix_that_wrote_the_text():
    """Text drawn from a known mix gives its weights back, within the noise of two thousand tokens."""
    base, counted = TabularLM.random(Rng(2), vocab_size=V, order=1), counts(2)
    truth = {"log p": -0.4, "order 2": 0.8, "log(1 + count)": -0.7, "followed the last two tokens": 1.5}
    from freenergy import SequenceSpace

    contexts = Sequences.from_lists([[1, 2, 3, 1]] * 400)
    draws = AdaptedLM(base, truth, counted).sample(contexts, 1, SequenceSpace(vocab_size=V, length=6), Rng(1))
    found = fit_local_mix(base, counted, list(truth), draws.x, l2=1e-6)
    assert torch.tensor([abs(found.weights[name] - w) for name, w in truth.items()]).max() < 0.35
