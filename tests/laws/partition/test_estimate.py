"""k̂ against arviz and against laws whose k is known; the verdict warns where it should and is silent elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from freenergy import Rng
from freenergy.partition import LogPartition, log_partition
from freenergy.partition.estimate import heaviest_tail, pareto_k, tail_length


def k_of(log_weights):
    return pareto_k(log_weights.sort(descending=True).values, len(log_weights))


@pytest.mark.parametrize("n", [30, 200, 3000])
def test_k_hat_is_arviz_s(n):
    base = pytest.importorskip("arviz_stats.base", reason="arviz-stats is the reference here")
    for seed, spread in enumerate((0.3, 1.0, 3.0)):
        log_weights = spread * Rng(seed).normal(n)
        wanted = float(base.array_stats.psislw(-log_weights.numpy())[1])  # it takes minus log-weights
        assert k_of(log_weights) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.statistical
@pytest.mark.parametrize("k", [0.2, 0.5, 0.8, 1.2])
def test_k_hat_of_a_pareto_law(k):
    """w = u^(−k) has k exactly, and the fit's error is about (1 + k)/√M: five of them are passed once in a million.

    The seed is fixed, so it fails always or never.
    """
    log_weights = -k * Rng(3).uniform(100_000).log()
    assert abs(k_of(log_weights) - k) < 5 * (1 + k) / math.sqrt(tail_length(100_000))
    assert abs(k_of(2 * log_weights) - k) > 0.15  # mutant: weights squared


def test_tails_that_cannot_be_fitted():
    assert math.isnan(k_of(Rng(4).normal(24)))  # no five in the tail
    assert not math.isnan(k_of(Rng(4).normal(25)))
    assert k_of(torch.zeros(100, dtype=torch.float64)) == -math.inf  # no tail
    few = torch.zeros(100, dtype=torch.float64)
    few[:3] = torch.tensor([1.0, 2.0, 3.0])
    assert math.isnan(k_of(few))
    assert k_of(torch.linspace(0, 1e5, 100).double()) == math.inf  # beyond floats
    assert math.isnan(k_of(torch.full((100,), -math.inf, dtype=torch.float64)))
    tied = torch.cat([torch.zeros(80), torch.ones(20)]).double()
    assert k_of(tied) < 0  # bounded


def test_the_heaviest_tail():
    assert heaviest_tail(32) == pytest.approx(1 - 1 / math.log10(32))
    assert heaviest_tail(10**9) == 0.7
    assert heaviest_tail(1) == -math.inf


def fine():
    """One context that nothing speaks against."""
    return log_partition(0.3 * Rng(5).normal(1, 1000))


def with_value(found, **values):
    return replace(found, **{name: torch.tensor([value]) for name, value in values.items()})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ess": 0.0}, "no draw has any weight"),
        ({"largest_share": 0.6}, "one draw carries most"),
        ({"ess": 99.0}, "few draws carry the weight"),
        ({"spread": 2.7}, "spread too far"),
        ({"k_hat": 0.68}, "tail"),
        ({"k_hat": math.nan}, "too few draws to tell"),
    ],
)
def test_each_reason(values, words):
    assert fine().verdicts() == [""]
    assert fine().verdict() == ""
    found = with_value(fine(), **values)
    assert words in found.verdicts()[0]
    assert words in found.verdict()
    assert "certificate" in found.verdict()


def test_what_is_just_good_enough_is_silent():
    for values in ({"ess": 100.0}, {"largest_share": 0.5}, {"spread": 2.6}, {"k_hat": 0.66}, {"k_hat": -math.inf}):
        assert with_value(fine(), **values).verdict() == "", values


def test_many_contexts_are_counted():
    bad = [with_value(fine(), k_hat=0.9)] * 2 + [with_value(fine(), ess=3.0)]
    found = LogPartition.cat([fine(), *bad])
    assert len(found.lower) == 4
    assert "in 3 of 4 contexts" in found.verdict()
    assert "tail" in found.verdict()
    assert found.verdicts()[0] == ""
    assert found.n == 1000


def test_few_draws_cannot_vouch_for_themselves():
    assert log_partition(torch.zeros(1, 2)).verdict()
    rates = [np.mean([bool(v) for v in log_partition(0.3 * Rng(6).normal(200, n)).verdicts()]) for n in (10, 1000)]
    assert rates[0] == 1
    assert rates[1] == 0
