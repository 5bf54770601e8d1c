"""Importance resampling, by walking every branch of its randomness.

P_n(x) = n · q(x) · w(x) · E[1 / (w(x) + W_{n−1})]  ≥  P(x) · n / (n − 1 + w(x)/Z)
TV(P, P_n) ≤ E_P[(w/Z − 1)⁺ / (n − 1 + w/Z)]
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.core.scored import Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers import Resampling, Sampler
from freenergy.samplers.resampling import distance
from freenergy.testing.targets import law_of_results

# strings of two tokens or an early EOS; with three candidates, of one token
each_n = pytest.mark.parametrize(
    ("n", "shape"),
    [(1, {}), (2, {}), (3, {"tokens": 4, "length": 1, "eos": None})],
    ids=["1", "2", "3"],
)
three_tokens = {"tokens": 3, "length": 1, "eos": None}
PROPOSALS = [
    (ANCESTRAL, "restricted"),
    (Truncation(top_k=2), "restricted"),
    (Truncation(temperature=0.6), "restricted"),
    (Truncation(temperature=0.6), "model"),
    (Truncation(temperature=1.5, top_k=2), "model"),
]
each_proposal = pytest.mark.parametrize(("truncation", "law"), PROPOSALS, ids=str)


def formula(q, w, n):
    """P_n of every string, by a sum over all (n − 1)-tuples of other draws."""
    found = torch.zeros_like(q)
    for others in itertools.product(range(len(q)), repeat=n - 1):
        chance = math.prod(q[i].item() for i in others)
        rest = sum(w[i].item() for i in others)
        found += chance * torch.where(q > 0, n * q * w / (w + rest), 0.0)
    return found


def far(q, w, n):
    """The bound on TV(P, P_n), with sums over all strings."""
    ratio = w / (q * w).sum()
    return (q * ratio * (ratio - 1).clamp(min=0) / (n - 1 + ratio).clamp(min=1e-300)).sum().item()


@each_n
@each_proposal
def test_the_law_is_the_formula(make_world, n, shape, truncation, law):
    world = make_world(**shape)
    sampler = Resampling(candidates=n, truncation=truncation, law=law)
    found = world.vector(law_of_results(sampler, world.target()))
    q, w = world.proposal(truncation), world.weights(law, truncation)
    torch.testing.assert_close(found, formula(q, w, n), atol=1e-12, rtol=0)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)
    if n == 1:
        torch.testing.assert_close(found, q, atol=1e-12, rtol=0)


@each_n
@each_proposal
def test_it_comes_nearer_as_the_bound_says(make_world, tv, n, shape, truncation, law):
    world = make_world(**shape)
    q, w, p = world.proposal(truncation), world.weights(law, truncation), world.law(law, truncation)
    emits, Z = formula(q, w, n), (q * w).sum()
    can_draw = q > 0
    assert (emits - p * n / (n - 1 + w / Z) >= -1e-14)[can_draw].all()  # Jensen, string by string
    assert tv(p, emits) <= far(q, w, n) + 1e-14
    if n == 1:
        assert far(q, w, 1) == pytest.approx(tv(p, q), abs=1e-14)
    else:
        assert tv(p, emits) < tv(p, formula(q, w, n - 1))
        assert tv(p, emits) > far(q, w, 8 * n)  # mutant: a bound for more candidates than there are


def test_the_distance_is_the_bound_on_the_draws():
    """Strings drawn as often as their probability says (1/8, 3/8, 4/8), so that the draws are the law."""
    q, w = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64) / 8, torch.tensor([5.0, 0.5, 2.0], dtype=torch.float64)
    draws = w.log().repeat_interleave(torch.tensor([1, 3, 4]))
    assert distance(draws) == pytest.approx(far(q, w, 8), abs=1e-14)
    assert distance(draws - 900) == pytest.approx(far(q, w, 8), abs=1e-12)
    assert distance(torch.zeros(5, dtype=torch.float64)) == pytest.approx(0, abs=1e-15)
    assert distance(torch.zeros(1, dtype=torch.float64)) == 1.0  # one draw says nothing


def by_hand(world, n, replacement):
    """The law of two results from n candidates, from all n-tuples; weights of equal strings are added."""
    q, w = world.proposal(), world.weights()
    found = Counter()
    for draws in itertools.product(range(len(q)), repeat=n):
        chance = math.prod(q[i].item() for i in draws)
        weight = Counter()
        for i in draws:
            weight[i] += w[i].item()
        if len(weight) < 2 and not replacement:
            found["refused"] += chance
            continue
        for a, b in itertools.product(weight, repeat=2):
            total = sum(weight.values())
            if replacement:
                found[world.names[a], world.names[b]] += chance * weight[a] * weight[b] / total**2
            elif a != b:
                found[world.names[a], world.names[b]] += chance * weight[a] / total * weight[b] / (total - weight[a])
    return found


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_the_law_of_two_results(make_world, n, replacement):
    world = make_world(**three_tokens)
    found, wanted = (
        law_of_results(Resampling(candidates=n, replacement=replacement), world.target(), num=2),
        by_hand(world, n, replacement),
    )
    assert set(found) == set(wanted)
    for key, chance in wanted.items():
        assert found[key] == pytest.approx(chance, abs=1e-12)
    if not replacement:
        assert found["refused"] > 0.01
        first = Counter()
        for pair, chance in found.items():
            if pair != "refused":
                first[pair[0]] += chance
        assert sum(first.values()) == pytest.approx(1 - found["refused"], abs=1e-12)


def test_merging_without_adding_is_seen(make_world, monkeypatch):
    """Mutant: of equal strings one is kept with its own weight alone; seen where two of three are equal."""
    world = make_world(**three_tokens)
    wanted = formula(world.proposal(), world.weights(), 3)
    mutant = lambda self: self.log_weight.masked_fill(~self.first(), -math.inf)  # noqa: E731
    monkeypatch.setattr(Scored, "merged", mutant)
    assert (world.vector(law_of_results(Resampling(candidates=3), world.target())) - wanted).abs().max() > 1e-2


def test_forbidden_strings_are_never_emitted(make_world):
    """With E = +inf for some: the law is that of what has weight, and the rest of the time there is nothing to emit."""
    world = make_world()
    world.energies[[1, 3]] = math.inf
    found = law_of_results(Resampling(candidates=2), world.target())
    refused = found.pop("refused")
    assert refused == pytest.approx(world.proposal()[[1, 3]].sum().item() ** 2, abs=1e-12)
    emits = world.vector(found)
    assert (emits[[1, 3]] == 0).all()
    q, w = world.proposal(), world.weights()
    pairs = sum(
        q[i] * q[j] * torch.nn.functional.one_hot(torch.tensor([i, j]), 7).double().T @ w[[i, j]] / (w[i] + w[j])
        for i, j in itertools.product(range(7), repeat=2)
        if w[i] + w[j] > 0
    )
    torch.testing.assert_close(emits, pairs, atol=1e-12, rtol=0)


def test_nothing_acceptable_is_said(world):
    world.energies[:] = math.inf
    for sampler in (Resampling(candidates=9), Resampling(candidates=9, effective=2.0, check_every=3)):
        with pytest.raises(UserError, match="no candidate is acceptable: all 9"):
            sampler(world.target(), 1, Rng(0))


def test_too_few_different_strings_are_said(world):
    with pytest.raises(UserError, match=r"8 different results were asked for, but there are [1-7] different"):
        Resampling(candidates=500, replacement=False)(world.target(), 8, Rng(0))
    different = Resampling(candidates=500, replacement=False)(world.target(), 7, Rng(0))
    assert sorted(tuple(x) for x in different.x.lists()[0]) == sorted(world.names)


def test_results_far_below_the_best_are_still_results(world):
    """A weight 2,000 nats below another is a weight: without replacement it comes last."""
    world.energies[:] = torch.arange(7).double() * 2000
    found = Resampling(candidates=500, replacement=False)(world.target(), 7, Rng(0))
    assert [tuple(x) for x in found.x.lists()[0]] == world.names


def test_draws_go_on_until_enough_are_effective(world):
    def ess(log_weight):
        w = log_weight.exp()
        return (w.sum() ** 2 / (w**2).sum()).item()

    sampler = Resampling(candidates=1000, effective=20.0, check_every=4)
    found = sampler(world.target(), 1, Rng(5)).candidates.log_weight[0]
    n = len(found)
    assert n % 4 == 0
    assert 20 < n < 1000
    assert ess(found) >= 20 > ess(found[: n - 4])
    fixed = Resampling(candidates=n)(world.target(), 1, Rng(5))
    assert torch.equal(fixed.candidates.log_weight[0], found)  # the same draws as with n fixed
    batched = replace(sampler, batch_size=3)(world.target(), 1, Rng(5))
    assert torch.equal(batched.candidates.log_weight[0], found)  # how many are in memory at once does not decide n
    short = Resampling(candidates=20, effective=20.0, check_every=4)
    notes = short(world.target(), 1, Rng(5)).notes
    assert any("of 20 candidates are effective, fewer than the 20 asked for" in note for note in notes)


def test_what_is_told(world):
    sampler = Resampling(candidates=40)
    assert isinstance(sampler, Sampler)
    found = sampler(world.target(), 3, Rng(1))
    places = [world.names.index(tuple(x)) for x in found.x.lists()[0]]
    assert found.energy[0].tolist() == world.energies[places].tolist()
    torch.testing.assert_close(found.log_base[0], world.log_base[places], atol=1e-14, rtol=0)
    torch.testing.assert_close(found.log_score, found.log_base - found.energy)
    assert found.chosen.tolist() == [found.candidates.x.lists()[0].index(x) for x in found.x.lists()[0]]
    assert found.base_tokens == sum(len(x) for x in found.candidates.x.lists()[0])
    assert found.distance == distance(found.candidates.log_weight[0])
    assert found.is_estimated
    assert any("only roughly" in note for note in found.notes)
    easy = Resampling(candidates=2000)(world.target(lambda x: 0.1 * world.energy(x)), 1, Rng(1))
    assert easy.notes == ()


def test_bad_settings_are_refused(world):
    for bad in ({"candidates": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="is 0: set it to 1 or more"):
            Resampling(**bad)
    for goal in (0.5, 300.0):
        with pytest.raises(UserError, match="effective candidates out of at most 256"):
            Resampling(effective=goal)
    with pytest.raises(UserError, match="top_k is 0"):
        Truncation(top_k=0)
