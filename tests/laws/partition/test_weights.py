"""Streaming sums against plain formulas in many digits, and the numbers that break plain formulas."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Rng, UserError
from freenergy.partition import WeightSums, certified_gain, effective_sample_size, log_partition
from freenergy.partition import weights as module

FIELDS = ("lower", "upper", "jackknife", "standard_error", "ess", "largest_share", "k_hat", "spread")


def streamed(log_weights, batch):
    sums = WeightSums.empty(len(log_weights))
    for part in log_weights.split(batch, dim=1):
        sums.add(part)
    return sums


def reference(log_weights):
    """T_n, upper and jackknife of one context, as the equations are written, with 1,500 digits."""
    with mpmath.workdps(1500):
        w = [mpmath.exp(mpmath.mpf(v)) for v in log_weights]
        n, S = len(w), mpmath.fsum(w)
        T = mpmath.log(S / n)
        loo = mpmath.fsum(mpmath.log((S - v) / (n - 1)) for v in w) / n
        return [float(v) for v in (T, (2 * n - 1) * T - 2 * (n - 1) * loo, n * T - (n - 1) * loo)]


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("n", [2, 3, 50])
def test_against_the_equations_in_many_digits(n, spread):
    log_weights = spread * Rng(1).normal(1, n) - 5
    found, wanted = log_partition(log_weights), reference(log_weights[0].tolist())
    for name, value in zip(("lower", "upper", "jackknife"), wanted, strict=True):
        assert getattr(found, name).item() == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_the_other_numbers_against_their_formulas():
    log_weights, n = 1.3 * Rng(2).normal(4, 200) + 3, 200
    found, w = log_partition(log_weights), log_weights.exp()
    torch.testing.assert_close(found.standard_error, w.std(1) / w.mean(1) / math.sqrt(n), atol=1e-14, rtol=0)
    torch.testing.assert_close(found.ess, effective_sample_size(log_weights))
    torch.testing.assert_close(found.largest_share, w.amax(1) / w.sum(1))
    torch.testing.assert_close(found.spread, log_weights.std(1))
    assert found.n == n
    assert found.draws.tolist() == [n] * 4


def test_the_wrong_sign_is_seen():
    """Mutant: an upper estimate that leans to the lower side."""
    log_weights = Rng(3).normal(1, 50)
    found, (T, upper, _) = log_partition(log_weights), reference(log_weights[0].tolist())
    mutant = T - (upper - T)
    assert abs(found.upper.item() - mutant) > 1e-3


@pytest.mark.parametrize("n", [40, 7_000, 30_000])
def test_batches_and_order_change_nothing(n):
    """Beyond KEPT draws most are in power sums only; the whole at once is sorted and summed otherwise."""
    log_weights = 2.5 * Rng(4).normal(2, n)
    turned = log_weights[:, Rng(5).permutation(n)]
    for name in FIELDS:
        whole = getattr(log_partition(log_weights), name)
        for other in (streamed(log_weights, 613), streamed(turned, 1999), streamed(turned, n)):
            torch.testing.assert_close(getattr(other.log_partition(), name), whole, rtol=1e-12, atol=1e-12)


def test_what_is_not_kept_is_summed_as_exactly(monkeypatch):
    log_weights = 1.5 * Rng(6).normal(1, 20_000)
    found = streamed(log_weights, 1000).log_partition()
    monkeypatch.setattr(module, "KEPT", 20_000)
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(log_partition(log_weights), name), getattr(found, name), rtol=1e-12, atol=1e-12
        )
    monkeypatch.setattr(module, "KEPT", 2)  # mutant: too few kept for four powers
    assert (streamed(log_weights, 1000).log_partition().upper - found.upper).abs() > 1e-12


def test_weights_two_thousand_nats_apart():
    log_weights = torch.linspace(-1000, 1000, 9).repeat(3, 1)
    log_weights[1] += 5000
    log_weights[2] -= 1e6
    found = log_partition(log_weights)
    for name in FIELDS[:-2]:
        assert not getattr(found, name).isnan().any(), name
    assert found.lower.tolist() == pytest.approx([1000 - math.log(9), 6000 - math.log(9), -999_000 - math.log(9)])
    assert found.upper[0].item() == pytest.approx(reference(log_weights[0].tolist())[1], rel=1e-12)
    assert found.upper.isfinite().all()
    naive = (log_weights[0].exp().sum() - log_weights[0].exp()).log()
    assert not naive.isfinite().all()  # mutant: log(S − w) of the largest
    many = streamed(2000 * Rng(7).uniform(2, 20_000), 999).log_partition()
    assert all(getattr(many, name).isfinite().all() for name in FIELDS)


def test_impossible_texts_have_no_weight():
    some = torch.tensor([[0.0, -math.inf, 1.0, 2.0], [-math.inf, 3.0, -math.inf, -math.inf], [-math.inf] * 4])
    found = log_partition(some)
    assert found.lower[0].item() == pytest.approx(math.log((1 + math.e + math.e**2) / 4))
    assert found.upper[0].isfinite()
    assert found.lower[1].item() == pytest.approx(3 - math.log(4))
    assert found.upper[1:].tolist() == [math.inf, math.inf]  # nobody can say how much more there is
    assert found.lower[2].item() == -math.inf
    assert found.ess.tolist()[1:] == [1, 0]
    assert not any(getattr(found, name).isnan().any() for name in FIELDS if name != "k_hat")
    assert found.verdicts()[1:] == ["one draw carries most of the weight", "no draw has any weight"]


@given(st.lists(st.floats(-1000, 1000), min_size=2, max_size=12), st.floats(-1e4, 1e4))
def test_a_constant_moves_log_z_by_it(values, constant):
    log_weights = torch.tensor([values], dtype=torch.float64)
    before, after = log_partition(log_weights), log_partition(log_weights + constant)
    for name in ("lower", "upper", "jackknife"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name) + constant, rtol=0, atol=1e-7)
    torch.testing.assert_close(after.ess, before.ess, rtol=1e-7, atol=0)
    assert before.lower <= before.jackknife + 1e-12
    assert before.jackknife <= before.upper + 1e-12


@pytest.mark.parametrize("n", [1, 2, 9, 6001])
def test_the_certificate_from_the_stream(n):
    data, draws = 3 * Rng(8).normal(4), 3 * Rng(9).normal(4, n - 1)
    sums = streamed(draws, 1000) if n > 1 else WeightSums.empty(4)
    torch.testing.assert_close(sums.certified_gain(data), certified_gain(-data, -draws), rtol=1e-12, atol=1e-12)
    forgets = data - draws.logsumexp(1) + math.log(n)  # mutant: the datum is not among the candidates
    assert (sums.certified_gain(data) - forgets).abs().max() > 1e-6
    impossible = torch.full((4,), -math.inf, dtype=torch.float64)
    assert sums.certified_gain(impossible).tolist() == [-math.inf] * 4


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_no_weight_is_refused(bad):
    sums = WeightSums.empty(1)
    with pytest.raises(UserError, match=r"draw 1 of context 0 is (inf|nan)"):
        sums.add(torch.tensor([[0.0, bad]]))
    with pytest.raises(UserError, match="log-weight"):
        sums.certified_gain(torch.tensor([bad]))
    assert sums.n == 0


def test_too_few_draws_are_refused():
    with pytest.raises(UserError, match="at least two draws"):
        log_partition(torch.zeros(2, 1))
    with pytest.raises(UserError, match="one draw or more"):
        WeightSums.empty(2).log_mean()
    with pytest.raises(UserError, match="3 contexts for 2"):
        WeightSums.empty(2).add(torch.zeros(3, 1))
