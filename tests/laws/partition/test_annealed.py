"""Annealed importance sampling by walking every branch: E[w] = Z forward, E[1/w] = 1/Z in reverse, and mutants."""

import math

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.partition.annealed import Annealed, Schedule, TextPath, anneal, anneal_back
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.kernels.single_site import SingleSite
from freenergy.testing import World, branches

FIXED = {"tokens": 2, "length": 2, "eos": None}


def path(world, kernel=None, moves=1):
    return TextPath(world.target(), kernel or Independence(), moves)


def mean_weight(own, schedule):
    return math.fsum(p * math.exp(log_w.item()) for p, log_w in branches(lambda rng: anneal(own, schedule, 1, rng)[0]))


def mean_inverse(own, schedule, world, start):
    """E[1/w] in reverse, x_{K−1} drawn from ``start``."""
    total = 0.0
    for i, p in enumerate(start.tolist()):
        x = world.x.candidates(torch.tensor([i]))
        found = branches(lambda rng, x=x: anneal_back(own, schedule, x, rng))
        total += p * math.fsum(chance * math.exp(-log_w.item()) for chance, log_w in found)
    return total


@pytest.mark.parametrize(
    ("shape", "kernel", "schedule"),
    [
        ({"tokens": 2}, Independence(), Schedule(temperatures=2)),
        (FIXED, SingleSite(), Schedule(temperatures=2, power=2.0)),
        ({**FIXED, "length": 1}, SingleSite(), Schedule(temperatures=4, power=0.7)),
    ],
    ids=["independence", "single-site", "single letter"],
)
def test_both_sides_are_unbiased(shape, kernel, schedule):
    world = World(**shape)
    own, Z = path(world, kernel), math.exp(world.log_partition())
    assert mean_weight(own, schedule) == pytest.approx(Z, rel=1e-12)
    assert mean_inverse(own, schedule, world, world.law()) == pytest.approx(1 / Z, rel=1e-12)


def test_mutants_are_biased():
    """A reverse run from draws of the base, and a kernel that leaves another density invariant."""
    world, schedule = World(tokens=2), Schedule(temperatures=2)
    Z = math.exp(world.log_partition())
    assert abs(mean_inverse(path(world), schedule, world, world.proposal()) * Z - 1) > 1e-2

    class Late:
        """Moves at the next β instead of its own."""

        log_partition_start = 0.0
        start, log_increase = path(world).start, path(world).log_increase

        def step(self, x, beta, rng, *, backward):
            return path(world).step(x, 1.0, rng, backward=backward)

    assert abs(mean_weight(Late(), schedule) / Z - 1) > 1e-3


def test_one_temperature_is_importance_sampling():
    world = World()
    log_w, x = anneal(path(world), Schedule(temperatures=1), 5, Rng(3))
    torch.testing.assert_close(log_w, -world.energy(x)[0], rtol=0, atol=0)


def test_both_bounds_bracket_log_z_and_the_verdict_sees_wrong_draws():
    """Seeded: the sides are within 0.1 of log Z; draws of the base in place of the target are noticed."""
    world = World(spread=2.0)
    estimator = Annealed(chains=400, schedule=Schedule(temperatures=8))
    exact = world.x.candidates(Rng(4).categorical(world.law().log().expand(400, -1)))
    found = estimator.bounds(world.target(), exact, Rng(1))
    assert found.lower - 0.1 < world.log_partition() < found.upper + 0.1
    assert found.verdict() == ""
    wrong = world.x.candidates(Rng(4).categorical(world.log_base.expand(400, -1)))
    crossed = Annealed(chains=400, schedule=Schedule(temperatures=1)).bounds(world.target(), wrong, Rng(1))
    assert "cross" in crossed.verdict() or "apart" in crossed.verdict()


def test_bad_settings_are_refused():
    world = World()
    for settings in ({"chains": 1}, {"moves": 0}, {"schedule": lambda: Schedule(temperatures=0)}):
        with pytest.raises(UserError, match="or more"):
            Annealed(**{key: value() if callable(value) else value for key, value in settings.items()})
    with pytest.raises(UserError, match=r"power is 0\.0: set it above 0"):
        Schedule(power=0.0)
    with pytest.raises(UserError, match="at least two draws"):
        Annealed().bounds(world.target(), world.x.candidates(slice(0, 1)), Rng(0))
    with pytest.raises(UserError, match="there is no kernel 'guess'"):
        Annealed(kernel="guess")(world.target(), Rng(0))
