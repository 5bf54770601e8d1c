"""Metropolis independence sampling: its whole transition matrix, by walking every branch of a step from every state.

K(x, y) = q(y) · min(1, w(y)/w(x)) for y ≠ x,      P K = P,      TV(P, law after t steps) ≤ (1 − Z/w_max)^t
"""

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare

from freenergy import Rng, UserError
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers import Sampler
from freenergy.samplers.kernels.independence import Independence, IndependenceState
from freenergy.samplers.metropolis import Metropolis, distance
from freenergy.testing.targets import law_of_results, transition_matrix

SMALL = {"tokens": 3, "length": 1, "eos": None}
PROPOSALS = [
    (ANCESTRAL, "restricted"),
    (Truncation(top_k=2), "restricted"),
    (Truncation(temperature=0.6), "model"),
    (Truncation(temperature=1.5, top_k=2), "model"),
]
each_proposal = pytest.mark.parametrize(("truncation", "law"), PROPOSALS, ids=str)


def by_hand(world, truncation=ANCESTRAL, law="restricted"):
    q, w = world.proposal(truncation), world.weights(law, truncation)
    K = q * (w / w.unsqueeze(1)).clamp(max=1)
    K.fill_diagonal_(0)
    return K + torch.diag(1 - K.sum(1))


@each_proposal
def test_every_transition(world, truncation, law):
    """K(x, y) = q(y) · min(1, w(y)/w(x)); that P K = P is in the contract of the kernel."""
    can_draw = world.proposal(truncation) > 0
    K = transition_matrix(Independence(truncation=truncation, law=law), world.target(), can_draw)
    torch.testing.assert_close(K[can_draw], by_hand(world, truncation, law)[can_draw], atol=1e-12, rtol=0)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_law_of_a_chain(make_world, steps, batch_size):
    """q K^t, whether steps are proposed one by one or together."""
    world = make_world(**SMALL)
    found = law_of_results(Metropolis(steps=steps, batch_size=batch_size), world.target())
    wanted = world.proposal() @ torch.linalg.matrix_power(by_hand(world), steps)
    torch.testing.assert_close(world.vector(found), wanted, atol=1e-12, rtol=0)


def test_chains_are_independent(make_world):
    world = make_world(**SMALL)
    found = law_of_results(Metropolis(steps=1), world.target(), num=2)
    one = world.proposal() @ by_hand(world)
    for (i, x), (j, y) in itertools.product(enumerate(world.names), repeat=2):
        assert found[x, y] == pytest.approx((one[i] * one[j]).item(), abs=1e-12)


def test_how_far_after_t_steps(make_world, tv):
    """From every start within (1 − Z/w_max)^t, and from the largest weight exactly 1 − P times that.

    Mutant: a bound for twice as many steps.
    """
    world = make_world(spread=1.5)
    K, p, q, w = by_hand(world), world.law(), world.proposal(), world.weights()
    log_z, log_bound = (q * w).sum().log().item(), w.max().log().item()
    heaviest = int(w.argmax())
    for t in range(40):
        rows = torch.linalg.matrix_power(K, t)
        bound = distance(log_z, log_bound, t)
        assert max(tv(p, row) for row in rows) <= bound + 1e-14
        assert tv(p, q @ rows) <= bound * tv(p, q) + 1e-14
        assert tv(p, rows[heaviest]) == pytest.approx(bound * (1 - p[heaviest].item()), abs=1e-12)
    assert tv(p, torch.linalg.matrix_power(K, 10)[heaviest]) > distance(log_z, log_bound, 20)


def test_a_chain_leaves_what_is_forbidden(make_world):
    """From a weight of zero any proposal is taken; P stays invariant, and the bound holds from there too."""
    world = make_world()
    world.energies[[1, 4]] = math.inf
    K, p = transition_matrix(Independence(), world.target()), world.law()
    torch.testing.assert_close(K[1], world.proposal(), atol=1e-12, rtol=0)
    torch.testing.assert_close(p @ K, p, atol=1e-12, rtol=0)
    assert (K[:, [1, 4]][[0, 2, 3, 5, 6]] == 0).all()
    Z, largest = (world.proposal() * world.weights()).sum(), world.weights().max()
    after = torch.linalg.matrix_power(K, 5)[1]
    assert (after - p).abs().sum() / 2 <= (1 - Z / largest) ** 5


@pytest.mark.parametrize("batch_size", [1, 3, 128])
@pytest.mark.parametrize("num", [1, 4])
def test_a_call_is_its_steps(world, num, batch_size):
    """The same bits step by step, however many are proposed at once; and what is told is of these steps."""
    sampler = Metropolis(steps=12, batch_size=batch_size)
    assert isinstance(sampler, Sampler)
    target, kernel, rng = world.target(), sampler.kernel, Rng(4)
    found = sampler(target, num, rng)
    state = IndependenceState(kernel.propose(target, num, rng.child("start")))
    log_weight, accepted, tokens = [state.at.log_weight[0]], 0, int(state.at.x.lengths.sum())
    for t in range(12):
        state, info = kernel.step(target, state, rng.child("step", t))
        log_weight.append(info.log_weight)
        accepted, tokens = accepted + int(info.is_accepted.sum()), tokens + info.base_tokens
    assert torch.equal(found.x.tokens, state.at.x.tokens)
    assert torch.equal(found.energy, state.at.energy)
    assert found.acceptance == accepted / (12 * num)
    assert found.base_tokens == tokens
    w = torch.cat(log_weight).exp()
    assert found.distance == pytest.approx((1 - (w.mean() / w.max()).item()) ** 12, rel=1e-9)
    assert found.is_estimated
    places = [world.names.index(tuple(x)) for x in found.x.lists()[0]]
    assert found.energy[0].tolist() == world.energies[places].tolist()


def test_chains_go_on_with_another_energy(world):
    """Positions are kept, energies are read again: a stale energy would leave another law invariant."""
    kernel, target = Independence(), world.target()
    state = IndependenceState(kernel.propose(target, 5, Rng(0)))
    world.energies.mul_(-1)
    fresh = kernel.init(target, state.x)
    assert torch.equal(fresh.at.energy, -state.at.energy)
    after, info = kernel.step(target, fresh, Rng(1))
    assert after.at.x.shape == (1, 5)
    moved = (after.at.energy != fresh.at.energy)[0]
    assert (moved <= info.is_accepted).all()


def test_a_stated_bound(world):
    largest = world.weights().max().log().item()
    stated = Metropolis(steps=50, log_bound=largest + 1)(world.target(), 1, Rng(1))
    seen = Metropolis(steps=50)(world.target(), 1, Rng(1))
    assert stated.distance > seen.distance
    assert torch.equal(stated.x.tokens, seen.x.tokens)
    wrong = Metropolis(steps=50, log_bound=largest - 3)(world.target(), 1, Rng(1))
    assert wrong.distance == seen.distance
    assert "is not a bound" in wrong.notes[0]
    assert any("estimated badly" in note for note in Metropolis(steps=3)(world.target(), 1, Rng(1)).notes)


def test_nothing_acceptable_is_said(world):
    world.energies[:] = math.inf
    with pytest.raises(UserError, match="no candidate is acceptable: a chain met none with any weight in 7 steps"):
        Metropolis(steps=7)(world.target(), 2, Rng(0))
    world.energies[2] = math.nan
    with pytest.raises(UserError, match="nan"):
        Metropolis(steps=50)(world.target(), 1, Rng(0))


def test_bad_settings_are_refused(world):
    for bad in ({"steps": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="is 0: set it to 1 or more"):
            Metropolis(**bad)
    with pytest.raises(UserError, match="log_bound is inf"):
        Metropolis(log_bound=math.inf)


@pytest.mark.statistical
def test_drawn_with_real_random_numbers(world, monkeypatch):
    """The ends of 4,000 chains of 3 steps follow q K³: Pearson's test at 1e-6, so one seed in a million fails.

    Walking branches cannot see streams that are not apart. Mutant: the same coins at every step.
    """
    sampler = Metropolis(steps=3, batch_size=4000)

    def fits():
        found = sampler(world.target(), 4000, Rng(3)).x.lists()[0]
        counts = torch.bincount(torch.tensor([world.names.index(tuple(x)) for x in found]), minlength=7)
        wanted = world.proposal() @ torch.linalg.matrix_power(by_hand(world), 3)
        return chisquare(counts.numpy(), 4000 * wanted.numpy()).pvalue >= 1e-6

    assert fits()
    child = Rng.child
    monkeypatch.setattr(Rng, "child", lambda self, *keys: child(self, keys[0]))
    assert not fits()
