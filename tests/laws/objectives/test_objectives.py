"""Objectives against plain slow formulas, finite differences, and numbers that would overflow."""

import math

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.core.roles import Objective, Scores
from freenergy.objectives import EARM, BinaryNCE, RankingNCE

CONDITIONAL = BinaryNCE(kind="conditional")
OBJECTIVES = [BinaryNCE(), BinaryNCE(noise_ratio=3.5), RankingNCE(), CONDITIONAL]


def sigmoid(s):
    return 1 / (1 + math.exp(-s))


def slow(objective, data, negatives):
    """The formulas in words of one syllable: exp, log and loops."""
    B, K = len(data), len(negatives[0])
    match objective:
        case BinaryNCE(noise_ratio=nu):
            nu = K if objective.kind == "conditional" else nu
            total = sum(-math.log(sigmoid(s - math.log(nu))) for [s] in data) / B
            return total + nu * sum(-math.log(sigmoid(math.log(nu) - s)) for row in negatives for s in row) / (B * K)
        case RankingNCE():
            terms = [
                math.log(math.exp(s) / (math.exp(s) + sum(map(math.exp, row))))
                for [s], row in zip(data, negatives, strict=True)
            ]
    return -sum(terms) / B


def scores(B=5, K=3, spread=2.0, has_law=False):
    rng = Rng(1)
    ratios = [rng.normal(B, 1), rng.normal(B, K)] if has_law else [None, None]
    energies = spread * rng.normal(B, 1) - 0.5, spread * rng.normal(B, K) + 0.5
    return tuple(map(Scores.relative, energies, ratios))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("has_law", [False, True])
def test_against_the_plain_formula(objective, has_law):
    data, negatives = scores(has_law=has_law)
    value = objective(data, negatives).value
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(slow(objective, data.logit.tolist(), negatives.logit.tolist()), abs=1e-12)


def test_earm_takes_other_arguments_and_is_not_an_objective():
    assert not isinstance(EARM(), Objective)
    assert all(isinstance(objective, Objective) for objective in OBJECTIVES)


def test_relative_scores_cancel_the_base_without_rounding():
    E, log_base = Rng(3).normal(2, 3), Rng(4).normal(2, 3)
    assert torch.equal(Scores.relative(E).logit, -E)
    ratio = Rng(5).normal(2, 3)
    absolute = Scores(log_base - E, log_base + ratio)
    torch.testing.assert_close(Scores.relative(E, ratio).logit, absolute.logit, atol=1e-14, rtol=0)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_energies_do_not_overflow(objective, size):
    for sign in (1.0, -1.0):
        a = torch.tensor([[sign * size], [0.0]], dtype=torch.float32, requires_grad=True)
        b = torch.tensor([[-sign * size, 1.0], [size, -size]], dtype=torch.float32, requires_grad=True)
        loss = objective(Scores.relative(a), Scores.relative(b))
        loss.value.backward()
        assert loss.value.isfinite()
        assert a.grad.isfinite().all()
        assert b.grad.isfinite().all()
        assert all(math.isfinite(value) for value in loss.metrics.values())
    wrong = objective(Scores.relative(torch.full((1, 1), size)), Scores.relative(torch.full((1, 2), 0.0))).value.item()
    assert wrong == pytest.approx(size, rel=0.1)  # linear in the error, not saturated


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_step_downhill_lowers_data_and_raises_noise(objective):
    a, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    objective(Scores.relative(a), Scores.relative(b)).value.backward()
    assert (a.grad > 0).all()
    assert (b.grad < 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_metrics(objective):
    data, negatives = (
        Scores.relative(torch.tensor([[-9.0], [2.0]])),
        Scores.relative(torch.tensor([[4.0, 9.0], [-3.0, 9.0]])),
    )
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
    zero = Scores.relative(torch.zeros(2, 1)), Scores.relative(torch.zeros(2, 4))
    for objective in (BinaryNCE(), RankingNCE()):
        metrics = objective(*zero).metrics
        assert (metrics["accuracy_data"], metrics["accuracy_noise"], metrics["certified_gain"]) == (0.5, 0.5, 0.0)
    assert BinaryNCE()(*zero).value.item() == pytest.approx(2 * math.log(2))
    assert RankingNCE()(*zero).value.item() == pytest.approx(math.log(5))


def test_conditional_is_binary_with_as_much_noise():
    data, negatives = scores(K=4)
    wanted = BinaryNCE(noise_ratio=4.0)(data, negatives).value
    torch.testing.assert_close(CONDITIONAL(data, negatives).value, wanted, atol=1e-12, rtol=0)
    assert abs((BinaryNCE()(data, negatives).value - wanted).item()) > 0.1


def test_ranking_does_not_see_a_constant_and_the_others_do():
    data, negatives = scores()
    for objective in OBJECTIVES:
        moved = objective(*(Scores(part.log_score + 1000, part.log_noise) for part in (data, negatives))).value
        gap = abs((moved - objective(data, negatives).value).item())
        assert gap < 1e-9 if isinstance(objective, RankingNCE) else gap > 1


@pytest.mark.parametrize("noise_ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_ratio_that_is_none(noise_ratio):
    with pytest.raises(UserError, match="noise_ratio"):
        BinaryNCE(noise_ratio=noise_ratio)


def test_conditional_takes_no_other_noise_ratio():
    with pytest.raises(UserError, match="leave noise_ratio out"):
        BinaryNCE(kind="conditional", noise_ratio=3.0)
