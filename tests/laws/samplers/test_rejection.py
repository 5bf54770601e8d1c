"""Rejection and quasi-rejection, by walking every branch of their randomness.

P_β(x) = q(x) · min(w(x), β) / Z_β,    accepted at Z_β/β,    TV(P, P_β) ≤ 1 − Z_β/Z
"""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from scipy.stats import chisquare

from freenergy import Continuations, Rng, UserError
from freenergy.core.scored import Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers import Sampler
from freenergy.samplers.rejection import (
    Divergence,
    QuasiRejection,
    Rejection,
    bound_for_acceptance,
    bound_for_distance,
    divergence,
    divergence_curve,
)
from freenergy.testing import branches
from freenergy.testing.targets import law_of_results

SMALL = {"tokens": 3, "length": 1, "eos": None}
PROPOSALS = [
    (ANCESTRAL, "restricted"),
    (Truncation(top_k=2), "model"),
    (Truncation(temperature=0.6), "restricted"),
    (Truncation(temperature=0.6), "model"),
]


def cut_law(world, bound, law="restricted", truncation=ANCESTRAL):
    """P_β and the acceptance rate, summed over all strings."""
    mass = world.proposal(truncation) * world.weights(law, truncation).clamp(max=bound)
    return mass / mass.sum(), mass.sum().item() / bound


@pytest.mark.parametrize(("truncation", "law"), PROPOSALS, ids=str)
def test_rejection_is_exact(make_world, truncation, law):
    """One proposal: accepted strings follow P to rounding, as often as Z/β."""
    world = make_world()
    p = world.law(law, truncation)
    bound = 1.5 * world.weights(law, truncation).max().item()
    sampler = Rejection(log_bound=math.log(bound), max_proposals=1, truncation=truncation, law=law)
    found = law_of_results(sampler, world.target())
    refused = found.pop("refused")
    _, rate = cut_law(world, bound, law, truncation)
    assert refused == pytest.approx(1 - rate, abs=1e-12)
    torch.testing.assert_close(world.vector(found), rate * p, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("max_proposals", "batch_size"), [(2, 1), (3, 1), (3, 2), (3, 3)])
def test_whenever_it_ends_it_is_exact(make_world, max_proposals, batch_size):
    """P(x) · (1 − (1 − Z/β)^max_proposals): what was rejected before, and how many are made at once, leave no trace."""
    world = make_world(**SMALL)
    bound = world.weights().max().item()
    sampler = Rejection(log_bound=math.log(bound), max_proposals=max_proposals, batch_size=batch_size)
    found = law_of_results(sampler, world.target())
    refused = found.pop("refused")
    _, rate = cut_law(world, bound)
    assert refused == pytest.approx((1 - rate) ** max_proposals, abs=1e-12)
    torch.testing.assert_close(world.vector(found), (1 - refused) * world.law(), atol=1e-12, rtol=0)


def test_two_results_are_independent(make_world):
    world = make_world(**SMALL)
    bound = 1.2 * world.weights().max().item()
    sampler = Rejection(log_bound=math.log(bound), max_proposals=3, batch_size=2)
    found = law_of_results(sampler, world.target(), num=2)
    p, a = world.law(), cut_law(world, bound)[1]
    enough = 3 * a**2 * (1 - a) + a**3
    for (i, x), (j, y) in itertools.product(enumerate(world.names), repeat=2):
        assert found[x, y] == pytest.approx((enough * p[i] * p[j]).item(), abs=1e-12)
    assert found["refused"] == pytest.approx(1 - enough, abs=1e-12)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_bound_that_is_none_gives_the_cut_law(make_world, tv, share):
    """Both samplers; mutant: told as exact."""
    world = make_world(**SMALL)
    bound = share * world.weights().max().item()
    wanted, rate = cut_law(world, bound)
    for sampler in (Rejection, QuasiRejection):
        found = law_of_results(sampler(log_bound=math.log(bound), max_proposals=2, batch_size=1), world.target())
        refused = found.pop("refused")
        assert refused == pytest.approx((1 - rate) ** 2, abs=1e-12)
        torch.testing.assert_close(world.vector(found), (1 - refused) * wanted, atol=1e-12, rtol=0)
    assert tv(wanted, world.law()) > 0.02
    found = run(world, Rejection(log_bound=math.log(bound), batch_size=50), num=30)
    assert found.is_estimated
    assert found.distance > 0.01
    assert "is not a bound" in found.notes[0]


@pytest.mark.parametrize("wish", [{"acceptance": 0.5}, {"distance": 0.2}], ids=str)
def test_the_pilot_chooses_the_bound_and_is_not_emitted(make_world, wish):
    """Σ over pilots of two draws: q(pilot) · q(x) · min(w(x), β(pilot))/β(pilot). Mutant: the pilot is emitted."""
    world = make_world(**SMALL)
    q, w = world.proposal(), world.weights()
    wanted, reused = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        choose = bound_for_acceptance if "acceptance" in wish else bound_for_distance
        bound = math.exp(choose(w[[i, j]].log(), *wish.values()))
        wanted += q[i] * q[j] * q * w.clamp(max=bound) / bound
        reused[i] += q[i] * q[j] * w[i].clamp(max=bound) / bound
    found = law_of_results(QuasiRejection(**wish, pilot=2, max_proposals=1), world.target())
    refused = found.pop("refused")
    assert refused == pytest.approx(1 - wanted.sum().item(), abs=1e-12)
    torch.testing.assert_close(world.vector(found), wanted, atol=1e-12, rtol=0)
    assert (wanted / wanted.sum() - reused / reused.sum()).abs().max() > 1e-2


# probabilities in sixteenths, so that sixteen draws can be the whole population
COUNTS = torch.tensor([1, 3, 4, 7, 1])
Q = COUNTS.double() / 16
W = torch.tensor([9.0, 0.5, 2.0, 0.0, 3.5], dtype=torch.float64)
POPULATION = W.log().repeat_interleave(COUNTS)


def candidates(log_weight):
    n = len(log_weight)
    zeros = torch.zeros(1, n, dtype=torch.float64)
    x = Continuations.from_lists([[1]], [[[i] for i in range(n)]])
    return Scored(x=x, log_base=zeros, log_proposal=zeros, energy=-log_weight.unsqueeze(0))


@pytest.mark.parametrize("bound", [0.1, 0.5, 1.0, 2.7, 6.0, 9.0, 30.0])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_the_divergence_over_all_strings(tv, bound, shift):
    found = divergence_curve(candidates(POPULATION + shift), [math.log(bound) + shift])[0]
    cut = Q * W.clamp(max=bound)
    p, p_cut = Q * W / (Q * W).sum(), cut / cut.sum()
    tolerance = 1e-12 if not shift else 1e-11  # log-weights near 1,000 have three digits less
    assert found.acceptance == pytest.approx(cut.sum().item() / bound, abs=tolerance)
    assert found.total_variation == pytest.approx(tv(p, p_cut), abs=tolerance)
    assert found.at_most == pytest.approx(1 - (cut.sum() / (Q * W).sum()).item(), abs=tolerance)
    there = p > 0
    assert found.kl == pytest.approx((p * (p / p_cut).log())[there].sum().item(), abs=tolerance)
    assert found.at_most >= found.total_variation - tolerance
    assert (found.total_variation > 1e-3) == (bound < 9)


def test_a_larger_bound_is_nearer_and_dearer():
    curve = divergence_curve(candidates(POPULATION), num=9)
    assert len(curve) == 9
    assert curve[0].acceptance == pytest.approx(0.9 * 9 / 16)  # nine of sixteen draws have any weight
    assert curve[-1].log_bound == pytest.approx(math.log(9.0))
    for name in ("acceptance", "total_variation", "at_most", "kl"):
        values = [getattr(point, name) for point in curve]
        assert values == sorted(values, reverse=True)
    assert curve[-1].at_most == curve[-1].total_variation == 0
    assert curve[0].at_most > 0.5
    even = divergence_curve(candidates(torch.zeros(5, dtype=torch.float64)), num=3)
    assert [(point.log_bound, point.acceptance, point.kl) for point in even] == [(0.0, 1.0, 0.0)] * 3


@pytest.mark.parametrize("num", [1, 2])
def test_the_estimate_of_the_acceptance_is_unbiased(world, num):
    bound = 0.5 * world.weights().max().item()
    mean = tv = 0.0
    for p, drawn in branches(lambda rng: world.model.propose(world.context, num, world.space, rng)):
        found = divergence_curve(drawn, [math.log(bound)])[0]
        mean, tv = mean + p * found.acceptance, tv + p * found.total_variation
    assert mean == pytest.approx(cut_law(world, bound)[1], abs=1e-12)
    assert tv < 0.9 * divergence_of(world, bound)  # a ratio of means leans down where draws are few: not unbiased


def divergence_of(world, bound):
    return (cut_law(world, bound)[0] - world.law()).abs().sum().item() / 2


def jackknife(log_weight, bound):
    n = len(log_weight)
    without = [torch.cat([log_weight[:i], log_weight[i + 1 :]]) for i in range(n)]
    values = torch.tensor([divergence(rest, bound).total_variation for rest in without], dtype=torch.float64)
    return ((n - 1) * (values - values.mean()).square().mean()).sqrt().item()


@pytest.mark.parametrize("bound", [0.0, 1.0, 2.0])
def test_the_standard_error_is_that_of_leaving_one_out(bound):
    """Within 5 % of the jackknife at 300 draws; forgetting that Z is estimated too would be 15 % off or more."""
    log_weight = Rng(6).normal(300)
    found, wanted = divergence(log_weight, bound), jackknife(log_weight, bound)
    assert found.standard_error == pytest.approx(wanted, rel=0.05)
    cut = log_weight.clamp(max=bound)
    terms = (log_weight.exp() / log_weight.exp().mean() - cut.exp() / cut.exp().mean()).clamp(min=0)
    assert abs(terms.std().item() / math.sqrt(300) / wanted - 1) > 0.15
    assert divergence(log_weight[:1], bound).standard_error == math.inf


def test_bounds_for_what_is_wanted():
    log_weight = torch.cat([Rng(6).normal(300), torch.full((20,), -math.inf, dtype=torch.float64)])
    for wanted in (0.9, 0.3, 0.01, 1e-4):
        bound = bound_for_acceptance(log_weight, wanted)
        assert divergence(log_weight, bound).acceptance == pytest.approx(wanted, rel=1e-9)
    assert bound > log_weight.max()  # one in ten thousand is less than the largest weight asks for
    for wanted in (0.3, 0.05, 1e-3):
        bound = bound_for_distance(log_weight, wanted)
        assert divergence(log_weight, bound).total_variation == pytest.approx(wanted, rel=1e-9)
        assert divergence(log_weight, bound - 0.01).total_variation > wanted
    even = torch.zeros(5, dtype=torch.float64)
    assert bound_for_distance(even, 0.2) == 0  # the smallest weight is good enough
    with pytest.raises(UserError, match=r"an acceptance of 0.95 cannot be reached: 300 of 320"):
        bound_for_acceptance(log_weight, 0.95)


def run(world, sampler, num=1, seed=0, **more):
    return sampler(world.target(), num, Rng(seed), **more)


def test_what_is_told(make_world):
    world = make_world(spread=0.5)
    largest = world.weights().max().log().item()
    sampler = Rejection(log_bound=largest, batch_size=16)
    assert isinstance(sampler, Sampler)
    found = run(world, sampler, num=20)
    assert (found.distance, found.is_estimated, found.notes, found.method) == (0.0, False, (), "rejection")
    assert found.acceptance == pytest.approx(cut_law(world, math.exp(largest))[1], abs=0.2)
    places = [world.names.index(tuple(x)) for x in found.x.lists()[0]]
    assert len(places) == 20
    assert found.energy[0].tolist() == world.energies[places].tolist()
    torch.testing.assert_close(found.log_base[0], world.log_base[places], atol=1e-14, rtol=0)
    assert found.base_tokens >= sum(len(x) for x in found.x.lists()[0])


def test_what_quasi_rejection_tells(make_world):
    world = make_world(spread=1.5)
    wish = QuasiRejection(distance=0.1, pilot=2000)
    found, bound = run(world, wish, num=5), wish.choose_bound(wish.draw_pilot(world.target(), Rng(0)))
    truth = cut_law(world, math.exp(bound))
    assert found.is_estimated
    assert found.distance == pytest.approx(0.1, abs=0.01)
    assert divergence_of(world, math.exp(bound)) == pytest.approx(0.1, abs=0.03)
    assert found.acceptance == pytest.approx(truth[1], abs=0.1)
    assert found.base_tokens >= 2000
    often = run(world, QuasiRejection(acceptance=0.7, pilot=500), num=50)
    assert often.acceptance == pytest.approx(0.7, abs=0.1)
    few = run(world, QuasiRejection(log_bound=0.0, batch_size=1))
    assert any("estimated badly" in note for note in few.notes)
    assert any("weights not seen yet" in note for note in run(world, QuasiRejection(log_bound=5.0)).notes)
    assert not any("weights not seen yet" in note for note in found.notes)


@pytest.mark.parametrize("sampler", [Rejection, QuasiRejection])
def test_a_spent_budget_is_said(make_world, sampler):
    world = make_world()
    with pytest.raises(
        UserError, match=r"0 of 3 results were accepted in 70 proposals, at a rate of \d.*e-18: raise max_proposals"
    ):
        run(world, sampler(log_bound=40.0, max_proposals=70, batch_size=32), num=3)
    with pytest.raises(UserError, match="at a rate of 0: raise max_proposals"):
        run(world, sampler(log_bound=4000.0, max_proposals=5))
    world.energies[:] = math.inf
    with pytest.raises(UserError, match="no candidate is acceptable: all 70 proposals have a weight of zero"):
        run(world, sampler(log_bound=0.0, max_proposals=70, batch_size=32), num=3)
    with pytest.raises(UserError, match="no candidate is acceptable: all 30"):
        run(world, QuasiRejection(distance=0.1, pilot=30))


def test_forbidden_strings_are_never_accepted(world):
    world.energies[[0, 3]] = math.inf
    found = run(world, Rejection(log_bound=world.weights().max().log().item()), num=60)
    assert {tuple(x) for x in found.x.lists()[0]} == {world.names[i] for i in (1, 2, 4, 5, 6)}
    world.energies[0] = math.nan
    with pytest.raises(UserError, match="nan"):
        run(world, Rejection(log_bound=3.0), num=60)


def test_it_says_how_far_it_is(world):
    class Counting:
        def __init__(self):
            self.done = {}

        @contextmanager
        def track(self, label, total=None, unit=""):
            def advance(amount, note=""):
                self.done[label] = self.done.get(label, 0) + amount

            yield advance

        def say(self, message):
            pass

    progress = Counting()
    run(world, QuasiRejection(acceptance=0.5, pilot=30, batch_size=4), num=7, progress=progress)
    assert progress.done == {"pilot": 30, "accepting": 7}


def test_bad_settings_are_refused(world):
    for bad in ({"max_proposals": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="is 0: set it to 1 or more"):
            Rejection(log_bound=0.0, **bad)
    with pytest.raises(UserError, match="log_bound is nan"):
        Rejection(log_bound=math.nan)
    for bad in ({}, {"log_bound": 1.0, "distance": 0.1}, {"acceptance": 0.1, "distance": 0.1}):
        with pytest.raises(UserError, match="give exactly one"):
            QuasiRejection(**bad)
    for bad in ({"acceptance": 0.0}, {"acceptance": 1.0}, {"distance": 1.5}):
        with pytest.raises(UserError, match="set it above 0 and below 1"):
            QuasiRejection(**bad)
    with pytest.raises(UserError, match="pilot is 0"):
        QuasiRejection(distance=0.1, pilot=0)
    two = Scored.cat([candidates(POPULATION)] * 2, dim=0)
    with pytest.raises(UserError, match="a curve is of one context"):
        divergence_curve(two)
    with pytest.raises(UserError, match="ask for 2 or more"):
        divergence_curve(candidates(POPULATION), num=1)
    assert isinstance(divergence_curve(candidates(POPULATION))[0], Divergence)


def fits(world, found, wanted):
    """Pearson's test of strings against a law, at 1e-6."""
    counts = torch.bincount(torch.tensor([world.names.index(tuple(x)) for x in found.x.lists()[0]]), minlength=7)
    return chisquare(counts.numpy(), len(found.x.lists()[0]) * wanted.numpy()).pvalue >= 1e-6


@pytest.mark.statistical
def test_drawn_with_real_random_numbers(world, monkeypatch):
    """4,000 results follow P (and P_β): each of two tests fails once in a million seeds.

    Walking branches cannot see streams that are not apart. Mutant: coins are the numbers that drew the first token.
    """
    largest = world.weights().max().item()
    exact = Rejection(log_bound=math.log(largest), batch_size=1000)
    near = QuasiRejection(log_bound=math.log(0.4 * largest), batch_size=1000)
    assert fits(world, run(world, exact, num=4000), world.law())
    assert fits(world, run(world, near, num=4000), cut_law(world, 0.4 * largest)[0])
    assert not fits(world, run(world, near, num=4000), world.law())
    child = Rng.child
    monkeypatch.setattr(Rng, "child", lambda self, *keys: child(self, *("draw" if k == "accept" else k for k in keys)))
    assert not fits(world, run(world, exact, num=4000), world.law())


@pytest.mark.parametrize("n", [3, 50, 53])
@pytest.mark.parametrize("level", [0.0, 0.1, -3.7])
def test_equal_weights_have_a_bound_too(n, level):
    """Rounding puts the mean of equal weights above the largest of them, for some numbers of draws."""
    log_weight = torch.full((n,), level, dtype=torch.float64)
    for acceptance in (0.9, 0.5, 0.1):
        assert bound_for_acceptance(log_weight, acceptance) == pytest.approx(level - math.log(acceptance), abs=1e-9)
    assert bound_for_distance(log_weight, 0.05) == level
