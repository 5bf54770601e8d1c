"""Objectives against plain slow formulas, finite differences, and numbers that would overflow."""

import math

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.core.roles import Objective, Scores
from freenergy.objectives import BinaryNCE, ConditionalNCE, RankingNCE

OBJECTIVES = [BinaryNCE(), BinaryNCE(noise_ratio=3.5), RankingNCE(), ConditionalNCE()]


def sigmoid(s):
    return 1 / (1 + math.exp(-s))


def slow(objective, data, negatives):
    """The formulas in words of one syllable: exp, log and loops."""
    B, K = len(data), len(negatives[0])
    match objective:
        case BinaryNCE(noise_ratio=nu):
            total = sum(-math.log(sigmoid(s - math.log(nu))) for [s] in data) / B
            return total + nu * sum(-math.log(sigmoid(math.log(nu) - s)) for row in negatives for s in row) / (B * K)
        case ConditionalNCE():
            terms = [
                math.log(sigmoid(s - math.log(K))) + sum(math.log(sigmoid(math.log(K) - n)) for n in row)
                for [s], row in zip(data, negatives, strict=True)
            ]
        case RankingNCE():
            terms = [
                math.log(math.exp(s) / (math.exp(s) + sum(map(math.exp, row))))
                for [s], row in zip(data, negatives, strict=True)
            ]
    return -sum(terms) / B


def scores(B=5, K=3, spread=2.0, log_ratio=False):
    rng = Rng(1)
    ratios = [rng.normal(B, 1), rng.normal(B, K)] if log_ratio else [None, None]
    return Scores(spread * rng.normal(B, 1) - 0.5, ratios[0]), Scores(spread * rng.normal(B, K) + 0.5, ratios[1])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("log_ratio", [False, True])
def test_against_the_plain_formula(objective, log_ratio):
    assert isinstance(objective, Objective)
    data, negatives = scores(log_ratio=log_ratio)
    value = objective(data, negatives).value
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(slow(objective, data.logit.tolist(), negatives.logit.tolist()), abs=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_gradients_against_finite_differences(objective):
    data, negatives = scores(log_ratio=True)
    a, b = data.energy.requires_grad_(), negatives.energy.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: objective(Scores(a, data.log_ratio), Scores(b, negatives.log_ratio)).value, (a, b)
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_energies_do_not_overflow(objective, size):
    for sign in (1.0, -1.0):
        a = torch.tensor([[sign * size], [0.0]], dtype=torch.float32, requires_grad=True)
        b = torch.tensor([[-sign * size, 1.0], [size, -size]], dtype=torch.float32, requires_grad=True)
        loss = objective(Scores(a), Scores(b))
        loss.value.backward()
        assert loss.value.isfinite()
        assert a.grad.isfinite().all()
        assert b.grad.isfinite().all()
        assert all(math.isfinite(value) for value in loss.metrics.values())
    wrong = objective(Scores(torch.full((1, 1), size)), Scores(torch.full((1, 2), 0.0))).value.item()
    assert wrong == pytest.approx(size, rel=0.1)  # linear in the error, not saturated


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_step_downhill_lowers_data_and_raises_noise(objective):
    a, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    objective(Scores(a), Scores(b)).value.backward()
    assert (a.grad > 0).all()
    assert (b.grad < 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_metrics(objective):
    data, negatives = Scores(torch.tensor([[-9.0], [2.0]])), Scores(torch.tensor([[4.0, 9.0], [-3.0, 9.0]]))
    metrics = objective(data, negatives).metrics
    energies = torch.tensor([-9.0, 2, 4, 9, -3, 9])
    assert metrics["energy_data"] == pytest.approx(-3.5)
    assert metrics["energy_noise"] == pytest.approx(4.75)
    assert metrics["spread"] == pytest.approx(energies.std(correction=0).item())
    expected = math.log(3) - RankingNCE()(data, negatives).value.item()
    assert metrics["certified_gain"] == pytest.approx(expected, abs=1e-12)
    wanted = (0.75, 0.75) if isinstance(objective, RankingNCE) else (0.5, 0.75)
    assert (metrics["accuracy_data"], metrics["accuracy_noise"]) == wanted
    assert all(type(value) is float for value in metrics.values())


def test_who_knows_nothing_is_right_half_of_the_time():
    zero = Scores(torch.zeros(2, 1)), Scores(torch.zeros(2, 4))
    for objective in (BinaryNCE(), RankingNCE()):
        metrics = objective(*zero).metrics
        assert (metrics["accuracy_data"], metrics["accuracy_noise"], metrics["certified_gain"]) == (0.5, 0.5, 0.0)
    assert BinaryNCE()(*zero).value.item() == pytest.approx(2 * math.log(2))
    assert RankingNCE()(*zero).value.item() == pytest.approx(math.log(5))


def test_conditional_is_binary_with_as_much_noise():
    data, negatives = scores(K=4)
    wanted = BinaryNCE(noise_ratio=4.0)(data, negatives).value
    torch.testing.assert_close(ConditionalNCE()(data, negatives).value, wanted, atol=1e-12, rtol=0)
    assert abs((BinaryNCE()(data, negatives).value - wanted).item()) > 0.1


def test_ranking_does_not_see_a_constant_and_the_others_do():
    data, negatives = scores()
    for objective in OBJECTIVES:
        moved = objective(Scores(data.energy + 1000), Scores(negatives.energy + 1000)).value
        gap = abs((moved - objective(data, negatives).value).item())
        assert gap < 1e-9 if isinstance(objective, RankingNCE) else gap > 1


@pytest.mark.parametrize("noise_ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_ratio_that_is_none(noise_ratio):
    with pytest.raises(UserError, match="noise_ratio"):
        BinaryNCE(noise_ratio=noise_ratio)
