"""The certificate against the exact law of importance resampling, and the effective sample size against its formula."""

import itertools
import math

import pytest
import torch

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM
from freenergy.core.roles import Scores
from freenergy.objectives import RankingNCE
from freenergy.partition import certified_gain, effective_sample_size

SPACE = SequenceSpace(vocab_size=3, length=3, eos=0)  # 15 strings


def world(spread=1.5):
    strings = SPACE.enumerate()
    x = Continuations(Sequences.from_lists([[]]), strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    base = TabularLM.random(Rng(1), vocab_size=3, order=1).log_prob(x)[0].exp()
    truth = TabularLM.random(Rng(2), vocab_size=3, order=2, spread=1.5).log_prob(x)[0].exp()
    return base, truth, spread * Rng(3).normal(SPACE.size)


def tuples(probs, n):
    """Every n-tuple of strings and its probability."""
    for chosen in itertools.product(range(len(probs)), repeat=n):
        at = torch.tensor(chosen, dtype=torch.long)
        yield at, probs[at].prod()


def resampled(base, energy, n):
    """The exact law of the text that resampling with n candidates emits."""
    law = torch.zeros_like(base)
    for at, probability in tuples(base, n):
        law.index_add_(0, at, probability * (-energy[at]).softmax(0))
    return law


def expected_gain(base, energy, n):
    """Of every string x, over all draws of n − 1 others."""
    gain = torch.zeros_like(base)
    for at, probability in tuples(base, n - 1):
        gain += probability * certified_gain(energy, energy[at].expand(len(base), n - 1))
    return gain


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("spread", [0.3, 1.5, 4.0])
def test_it_is_a_lower_bound_on_what_resampling_emits(n, spread):
    base, truth, energy = world(spread)
    law = resampled(base, energy, n)
    assert law.sum().item() == pytest.approx(1, abs=1e-12)
    slack = law.log() - (base.log() + expected_gain(base, energy, n))
    assert (slack >= -1e-12).all()
    assert (truth * slack).sum() >= -1e-12
    if n > 1:  # Jensen is strict, and a flipped sign breaks the bound
        assert (slack > 1e-6).all()
        assert (law.log() - (base.log() + expected_gain(base, -energy, n)) < 0).any()


@pytest.mark.parametrize("n", [2, 3, 8])
def test_it_is_the_ranking_loss(n):
    data, draws = 3 * Rng(4).normal(5, 1), 3 * Rng(5).normal(5, n - 1)
    loss = RankingNCE()(Scores.relative(data), Scores.relative(draws)).value
    assert certified_gain(data, draws).mean().item() == pytest.approx(math.log(n) - loss.item(), abs=1e-12)


def test_one_candidate_gains_nothing_and_n_at_most_log_n():
    assert certified_gain(torch.tensor([3.0, -2.0]), torch.zeros(2, 0)).tolist() == [0, 0]
    gain = certified_gain(torch.tensor([-1e4, 1e4]), torch.zeros(2, 9))
    assert gain.dtype == torch.float64
    assert gain[0].item() == pytest.approx(math.log(10), abs=1e-12)
    assert gain[1].item() == pytest.approx(-1e4 + math.log(10 / 9))


def test_a_constant_changes_nothing():
    data, draws = Rng(6).normal(4, 1), Rng(7).normal(4, 3)
    torch.testing.assert_close(
        certified_gain(data + 1000, draws + 1000), certified_gain(data, draws), atol=1e-9, rtol=0
    )


def test_effective_sample_size():
    log_weights = 2 * Rng(8).normal(6, 10)
    w = log_weights.exp()
    torch.testing.assert_close(effective_sample_size(log_weights), w.sum(1) ** 2 / (w**2).sum(1))
    torch.testing.assert_close(effective_sample_size(log_weights + 1e4), w.sum(1) ** 2 / (w**2).sum(1))
    assert effective_sample_size(torch.tensor([[0.0] * 7])).item() == pytest.approx(7)
