"""The certificate of sequential Monte Carlo, by enumeration of all randomness of both algorithms.

P_N(x) = γ(x) · E_cSMC(x)[1/Ẑ]    for every string x,     so    E_cSMC(x)[log γ(x) − log Ẑ] ≤ log P_N(x)
"""

import math
from functools import cache

import pytest
import torch

from freenergy import Continuations, Rng, Truncation, UserError
from freenergy.samplers import kept
from freenergy.samplers.conditional import conditional_run
from freenergy.samplers.sequential import Sequential
from freenergy.testing import World, branches, law

EXACT, CAUGHT = 1e-12, 1e-6


@cache
def noise(string):
    """A twist that knows nothing."""
    return Rng(5).child("string", *string).normal().item()


class Twisted:
    """The world's energy on whole strings, noise on unfinished ones."""

    def __init__(self, world):
        self.table = dict(zip(world.names, world.energies.tolist(), strict=True))

    def __call__(self, x):
        rows = [[self.table.get(tuple(string), noise(tuple(string))) for string in row] for row in x.lists()]
        return torch.tensor(rows, dtype=torch.float64)


def gap(world, sampler):
    """Return the largest error of the identity over all strings, and that of the bound (at most 0 where it holds)."""
    target = world.target(Twisted(world))
    emitted = law(lambda rng: sampler(target, 1, rng), lambda found: tuple(found.x.lists()[0][0]))
    worst, above = 0.0, -math.inf
    for name in world.names:
        x, inverse, mean, total = Continuations.from_lists([[1]], [[list(name)]]), 0.0, 0.0, 0.0
        for probability, run in branches(lambda rng, x=x: conditional_run(target, x, sampler, rng)):
            inverse += probability * math.exp(run.log_prob)
            mean += probability * run.log_prob
            total += probability
        assert total == pytest.approx(1.0)
        worst = max(worst, abs(inverse - emitted[name]))
        if worst > CAUGHT:  # a mutant
            break
        above = max(above, mean - math.log(emitted[name]))
    return worst, above


SHORT = World(tokens=2, length=2, eos=None)
ENDED = World(tokens=2, length=2, eos=0)  # EOS before the last look
THREE = World(tokens=2, length=3, eos=0)  # three looks
STRATA, MULTINOMIAL = "strata", "multinomial"


@pytest.mark.parametrize(
    ("world", "resampling", "settings"),
    [
        (SHORT, STRATA, {"particles": 2, "check_every": 1, "share": 1.0}),
        (SHORT, MULTINOMIAL, {"particles": 2, "check_every": 1, "share": 1.0}),
        (SHORT, STRATA, {"particles": 2, "check_every": 1, "share": 0.9}),  # the rule depends on the weights
        (SHORT, MULTINOMIAL, {"particles": 2, "check_every": 1, "share": 0.97}),
        (SHORT, STRATA, {"particles": 2, "check_every": 1, "share": 0.0}),  # never: importance resampling
        (ENDED, STRATA, {"particles": 2, "check_every": 1, "share": 1.0}),
        (ENDED, MULTINOMIAL, {"particles": 2, "check_every": 1, "share": 0.9}),
        (THREE, STRATA, {"particles": 2, "check_every": 1, "share": 0.95}),
        (THREE, STRATA, {"particles": 2, "check_every": 2, "share": 1.0}),  # the last look is nearer
        (ENDED, STRATA, {"particles": 3, "check_every": 1, "share": 0.9}),
        (ENDED, STRATA, {"particles": 3, "check_every": 1, "share": 1.0, "batch_size": 2}),  # islands of 2 and 1
    ],
)
def test_the_law_of_what_is_emitted(world, resampling, settings):
    worst, above = gap(world, Sequential(resampling=resampling, **settings))
    assert worst < EXACT
    assert above < EXACT


@pytest.mark.parametrize("law", ["model", "restricted"])
def test_with_a_temperature_each_law_has_its_own_target(law):
    sampler = Sequential(particles=2, check_every=1, share=1.0, truncation=Truncation(temperature=0.6), law=law)
    assert gap(ENDED, sampler)[0] < EXACT


def test_a_mutant_that_keeps_the_particle_in_slot_zero_is_caught(monkeypatch):
    def placed(self, rows, log_weight, is_due, resampling, rng, length):
        rows = rows.clone()
        for b in is_due.nonzero().flatten().tolist():
            rows[b, 0], self.slots[b] = int(self.slots[b]), 0
        return rows

    monkeypatch.setattr(kept.KeptParticles, "placed", placed)
    assert gap(ENDED, Sequential(particles=3, check_every=1, share=1.0, resampling=STRATA))[0] > CAUGHT
    assert gap(SHORT, Sequential(particles=2, check_every=1, share=1.0, resampling=MULTINOMIAL))[0] < EXACT


def test_a_mutant_that_begins_in_slot_zero_is_caught(monkeypatch):
    inner = kept.KeptParticles.__init__

    def begin(self, given, num, rng):
        inner(self, given, num, rng)
        self.slots = torch.zeros_like(self.slots)

    monkeypatch.setattr(kept.KeptParticles, "__init__", begin)
    assert gap(ENDED, Sequential(particles=3, check_every=1, share=1.0, resampling=STRATA))[0] > CAUGHT


LONG = World(tokens=2, length=3, eos=None)


def test_a_text_of_weight_zero_on_its_way_is_certified_nothing():
    def energy(x):
        strings = [[tuple(string) for string in row] for row in x.lists()]
        return torch.tensor([[math.inf if s == (1,) else 0.1 * len(s) for s in row] for row in strings]).double()

    target = LONG.target(energy)
    for seed in range(8):
        for tokens, is_lost in (([1, 0, 1], True), ([0, 1, 1], False)):
            x = Continuations.from_lists([[1]], [[tokens]])
            run = conditional_run(target, x, Sequential(particles=4, check_every=1, share=1.0), Rng(seed))
            assert (run.log_prob == -math.inf) == is_lost


def test_no_gain_is_above_the_looks_times_log_n():
    world, sampler = World(tokens=2, length=4, eos=None, spread=9.0), Sequential(particles=4, check_every=1, share=1.0)
    target = world.target(Twisted(world))
    for b, name in enumerate(world.names):
        x = Continuations.from_lists([[1]], [[list(name)]])
        run = conditional_run(target, x, sampler, Rng(b))
        resampled = int(run.particles.islands[0].is_resampled.sum())
        assert run.log_prob - float(world.base.log_prob(x)) <= (resampled + 1) * math.log(4) + 1e-9


def test_texts_that_cannot_be_written_are_refused():
    sampler = Sequential(particles=2)
    with pytest.raises(UserError, match="not in a space of 3"):
        conditional_run(LONG.target(), Continuations.from_lists([[1]], [[[0, 1]]]), sampler, Rng(0))
    with pytest.raises(UserError, match="one text of one context"):
        conditional_run(LONG.target(), Continuations.from_lists([[1]], [[[0, 1, 1], [0, 0, 0]]]), sampler, Rng(0))
