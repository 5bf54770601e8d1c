"""The certified report against numbers that are known, and its interval against repeated sampling."""

import math

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, UserError
from freenergy.energies.checked import energies_in_parts, energies_of
from freenergy.evaluation.certified import certify


def report(energy, log_base=None, tokens=None, documents=None):
    W = len(energy)
    log_base = -10.0 * torch.ones(W, dtype=torch.float64) if log_base is None else log_base
    tokens = 4.0 * torch.ones(W, dtype=torch.float64) if tokens is None else tokens
    return certify(log_base, energy, tokens, np.arange(W) if documents is None else documents)


def test_an_energy_of_zero_gains_nothing():
    found = report(torch.zeros(5, 8, dtype=torch.float64))
    assert found.nats_per_sequence.value == pytest.approx(0)
    assert found.base.value == found.certified.value == pytest.approx(math.exp(2.5))
    assert found.pair_accuracy == found.nce_accuracy == 0.5
    assert found.ess == pytest.approx(7)
    assert "no gain is shown" in found.note


def test_a_perfect_energy_reaches_the_ceiling_and_says_so():
    energy = torch.zeros(5, 8, dtype=torch.float64)
    energy[:, 0] = -1000
    found = report(energy)
    assert found.nats_per_sequence.value == pytest.approx(math.log(8))
    assert found.percent.value == pytest.approx(100 * (1 - 8 ** (-1 / 4)))
    assert found.percent.value == pytest.approx(found.ceiling_percent)
    assert "the most that 8 candidates can certify" in found.note


def test_numbers_by_hand():
    energy = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
    tokens = torch.tensor([3.0, 5.0], dtype=torch.float64)
    found = report(energy, log_base=torch.tensor([-6.0, -20.0], dtype=torch.float64), tokens=tokens)
    w = (-energy).exp()
    gains = (w[:, 0] / w.mean(1)).log()
    assert found.nats_per_sequence.value == pytest.approx(gains.mean().item())
    assert found.certified.value == pytest.approx(math.exp((26 - gains.sum().item()) / 8))
    assert found.percent.value == pytest.approx(100 * (1 - math.exp(-gains.sum().item() / 8)))
    assert found.pair_accuracy == pytest.approx(2 / 4)
    share = w[:, 1:].amax(1) / w[:, 1:].sum(1)
    assert found.largest_share == pytest.approx(share.mean().item())


def test_a_constant_changes_nothing():
    energy = Rng(0).normal(20, 16)
    found, moved = report(energy), report(energy + 1000)
    assert moved.nats_per_sequence.value == pytest.approx(found.nats_per_sequence.value, abs=1e-9)


@pytest.mark.statistical
def test_the_interval_of_the_gain_covers_as_often_as_it_says():
    """Windows in documents that are alike; 95 % ± 5 standard errors of 1,000 repeats (false-failure rate 6e-7).

    The mutant takes every window for a document of its own, and covers far less often.
    """
    n, repeats = 4, 1000

    def trial(rng, by_document):
        ease = np.repeat(rng.normal(0, 1.0, 30), 4)
        energy = torch.from_numpy(rng.normal(0, 1, (120, n)))
        energy[:, 0] -= torch.from_numpy(ease)
        found = report(energy, documents=np.repeat(np.arange(30), 4) if by_document else np.arange(120))
        return found.nats_per_sequence

    large = np.random.default_rng(1)
    energy = torch.from_numpy(large.normal(0, 1, (2_000_000, n)))
    energy[:, 0] -= torch.from_numpy(large.normal(0, 1, 2_000_000))
    truth = report(energy, documents=np.zeros(2_000_000, dtype=int)).nats_per_sequence.value
    covers = [
        np.mean([m.low <= truth <= m.high for m in (trial(np.random.default_rng(s), kind) for s in range(repeats))])
        for kind in (True, False)
    ]
    allowed = 5 * math.sqrt(0.95 * 0.05 / repeats)
    assert abs(covers[0] - 0.95) < allowed
    assert covers[1] < 0.95 - allowed


class Broken:
    def __init__(self, change):
        self.change = change

    def __call__(self, x):
        return self.change(torch.zeros(x.shape))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda E: E[:, :1], r"Broken returned shape \(2, 1\) for 2 contexts with 3 continuations each in the batch"),
        (lambda E: E.tolist(), "Broken returned a list"),
        (lambda E: E.index_fill(1, torch.tensor([2]), math.nan), "returned nan for continuation 2 of context 0 in the"),
    ],
)
def test_a_broken_energy_is_named_with_its_batch(change, words):
    lm = TabularLM.random(Rng(0), vocab_size=3, order=1)
    x = Continuations.from_lists([[1], [2]], [[[1, 2]] * 3] * 2)
    with pytest.raises(UserError, match=words):
        energies_of(Broken(change), x, where="the batch of step 7")
    assert energies_of(Broken(lambda E: E), x).shape == lm.log_prob(x).shape


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_parts_change_nothing(rows):
    lm = TabularLM.random(Rng(0), vocab_size=3, order=1)
    space = SequenceSpace(vocab_size=3, length=3)
    x = Continuations.from_lists([[1], [2], []], [[[1]], [[2]], [[0]]])
    x = lm.sample(x.contexts, 4, space, Rng(1)).x
    assert torch.equal(energies_in_parts(lm.log_prob, x, rows=rows), lm.log_prob(x))
