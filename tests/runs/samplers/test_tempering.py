"""Parallel tempering: the product of all rungs is invariant, by every branch; mutants of the exchange are refused."""

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.samplers import tempering
from freenergy.samplers.tempering import Ladder, Tempering
from freenergy.testing import World, law

SHAPE = {"tokens": 2, "length": 1, "eos": None}


def transition(world, sampler, parity):
    """The matrix of one step on pairs of states (lowest rung, top)."""
    n, target = len(world.names), world.target()
    K = torch.zeros(n * n, n * n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            x = [world.x.candidates(torch.tensor([own])) for own in (i, j)]
            start = Ladder(tuple(x), tuple(world.energy(own)[0] for own in x))
            found = law(
                lambda rng, start=start: sampler.step(target, start, parity, rng)[0],
                lambda state: tuple(world.names.index(tuple(own.lists()[0][0])) for own in state.x),
            )
            for (a, b), p in found.items():
                K[n * i + j, n * a + b] = p
    return K


def product_law(world):
    return torch.outer(world.log_base.exp(), world.law()).flatten()


def test_the_product_of_the_rungs_is_invariant():
    world, sampler = World(**SHAPE), Tempering(rungs=2, kernel="gibbs")
    P = product_law(world)
    K = transition(world, sampler, 0)
    torch.testing.assert_close(K.sum(1), torch.ones(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(P @ K, P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [-1.0, 0.0], ids=["inverted", "always"])
def test_mutants_of_the_exchange_are_refused(factor, monkeypatch):
    world, sampler, right = World(**SHAPE), Tempering(rungs=2, kernel="gibbs"), tempering.acceptance
    monkeypatch.setattr(tempering, "acceptance", lambda log_ratio: right(factor * log_ratio))
    P = product_law(world)
    assert (P @ transition(world, sampler, 0) - P).abs().max() > 1e-3


def test_ladders_cross_what_single_chains_cannot():
    """Two wells with a wall of 30 nats: the share of the deeper one is right within 5 errors of 200 ladders. Seeded."""
    world = World(tokens=3, length=2, eos=None)
    world.energies[:] = 30.0
    world.energies[0], world.energies[-1] = 0.0, -1.0
    found = Tempering(steps=15, rungs=6)(world.target(), 200, Rng(1))
    share = sum(tuple(x) == world.names[-1] for x in found.x.lists()[0]) / 200
    wanted = world.law()[-1].item()
    assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / 200) ** 0.5
    assert 0 < found.acceptance <= 1


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="rungs is 1: set it to 2 or more"):
        Tempering(rungs=1)
    with pytest.raises(UserError, match="there is no kernel 'guess'"):
        Tempering(kernel="guess")(World().target(), 2, Rng(0))
