"""Every registered sampler and kernel: one row each; and mutants that the checks must refuse."""

import math
from dataclasses import dataclass

import pytest
import torch

from freenergy import Rng, Truncation
from freenergy.core.truncation import ANCESTRAL
from freenergy.samplers.accept import accept, acceptance
from freenergy.samplers.kernels.independence import Independence, IndependenceInfo, IndependenceState
from freenergy.samplers.kernels.single_site import SingleSite
from freenergy.samplers.registry import KERNELS, SAMPLERS, sampler_named
from freenergy.testing import World, check_kernel, check_sampler
from freenergy.testing.targets import law_of_sampler

SMALL = {"tokens": 3, "length": 1, "eos": None}
FIXED = {"tokens": 2, "length": 2, "eos": None}
TOP_2 = {"truncation.top_k": 2}
LARGEST = {"log_bound": 1.2}  # above every log-weight of these worlds

# name: (settings, the world, the law that is sampled, how far from it in total variation a result may be;
# None where the law has too many branches to walk)
SAMPLER_ROWS = {
    "base": [({}, SMALL, "base", 0), (TOP_2, SMALL, "base", 0)],
    "resampling": [({"candidates": 3}, SMALL, "model", 0.2), ({"candidates": 2, **TOP_2}, {}, "restricted", 0.2)],
    "best-of-n": [
        ({"candidates": 6, "by": "energy"}, {"tokens": 2, "length": 1, "eos": None}, "best", 0),
        ({"candidates": 6, "by": "likelihood", **TOP_2}, SMALL, "best", 0),
        ({"candidates": 6, "by": "model", **TOP_2}, SMALL, "best", 0),
    ],
    "rejection": [({**LARGEST, "max_proposals": 2}, SMALL, "model", 0)],
    "quasi-rejection": [
        ({**LARGEST, "max_proposals": 2}, SMALL, "model", 0),
        ({"distance": 0.1, "pilot": 30}, {}, "model", None),
    ],
    "metropolis": [({"steps": 2}, SMALL, "model", 0.2)],
    "tempering": [({"steps": 3, "kernel": "independence"}, SMALL, "model", None)],  # its law: test_tempering.py
    "sequential": [({"particles": 2, "check_every": 1}, FIXED, "model", 0.2)],
    "autoregressive": [
        ({"completions": 2, "top_k": 2}, FIXED, "model", 0.1),
        ({"completions": 4}, {"length": 3}, "model", None),
    ],
}
KERNEL_ROWS = {
    "independence": [
        ({}, {}, "model"),
        ({}, FIXED, "model"),
        ({"truncation.top_k": 2, "law": "restricted"}, {}, "restricted"),
        ({"truncation.top_k": 1, "law": "restricted"}, FIXED, "restricted"),
        ({"truncation.temperature": 0.6, "law": "model"}, {}, "model"),
        ({"truncation.temperature": 0.6, "law": "model"}, FIXED, "model"),
        ({"truncation.temperature": 1.5, "truncation.top_k": 2, "law": "model"}, {}, "model"),
        ({"truncation.temperature": 1.5, "truncation.top_p": 0.7, "law": "model"}, FIXED, "model"),
    ],
    "single-site": [({}, SMALL, "model"), ({}, FIXED, "model"), ({"temperature": 1.7}, FIXED, "model")],
    # larger worlds and other settings of these: tests/runs/samplers/test_kernels.py
    "mixture": [({"local": "suffix"}, {"tokens": 2}, "model")],
    "gibbs": [({}, SMALL, "model"), ({"metropolised": True}, SMALL, "model")],
    "locally-balanced": [({}, SMALL, "model")],
    "discrete-langevin": [({}, SMALL, "model")],
}


def flat(rows):
    return [pytest.param(name, *row, id=f"{name} {row[0]}") for name, each in rows.items() for row in each]


def target(world):
    """The target of the world, whose energy has a number for unfinished texts too, as good as any."""

    def energy(x):
        known = dict(zip(world.names, world.energies.tolist(), strict=True))
        rows = [[known.get(tuple(string), 0.3 * len(string)) for string in row] for row in x.lists()]
        return torch.tensor(rows, dtype=torch.float64)

    return world.target(energy)


def probs(world, law, settings):
    options = {name.removeprefix("truncation."): value for name, value in settings.items() if "truncation." in name}
    truncation = Truncation(**options)
    if law == "best":
        return best(world, world.proposal(truncation), settings)
    return world.proposal(truncation) if law == "base" else world.law(law, truncation)


def best(world, q, settings):
    """P(all n draws are at most as good as x) − P(all are worse)."""
    scores = {"energy": -world.energies, "likelihood": world.log_base, "model": world.log_base - world.energies}
    score, n = scores[settings["by"]], settings["candidates"]
    below = torch.stack([q[score < own].sum() for own in score])
    return (below + q) ** n - below**n


def test_every_part_has_a_row():
    assert set(SAMPLER_ROWS) == set(SAMPLERS)
    assert set(KERNEL_ROWS) == set(KERNELS)


@pytest.mark.parametrize(("name", "settings", "shape", "law", "within"), flat(SAMPLER_ROWS))
def test_a_sampler_keeps_its_contract(name, settings, shape, law, within):
    world = World(**shape)
    sampler = sampler_named(name, settings)
    is_short = "max_proposals" in settings  # its law is walked with two proposals, its results need more
    if is_short:
        check_sampler(sampler_named(name, LARGEST), target(world), is_enumerable=False)
        torch.testing.assert_close(law_of_sampler(sampler, target(world)), world.law(), atol=1e-12, rtol=0)
    else:
        far, walk = max(within or 0, 1e-12), within is not None
        check_sampler(sampler, target(world), probs=probs(world, law, settings), within=far, is_enumerable=walk)


@pytest.mark.parametrize(("name", "settings", "shape", "law"), flat(KERNEL_ROWS))
def test_a_kernel_keeps_its_contract(name, settings, shape, law):
    world = World(**shape)
    check_kernel(sampler_named(name, settings).kernel, world.target(), probs=probs(world, law, settings))


@pytest.mark.parametrize("name", ["independence", "single-site"])
def test_chains_of_a_kernel_are_a_sampler(name):
    """q K² is nearer than q, and q K⁰ would be q; the distance is reported as unknown."""
    world = World(**SMALL)
    chain = sampler_named(name, {"steps": 2})
    check_sampler(chain, world.target(), within=0.2)
    with pytest.raises(AssertionError, match="from its target in total variation"):
        check_sampler(chain, world.target(), within=1e-3)
    found = chain(world.target(), 5, Rng(0))
    assert (found.distance, found.is_estimated, found.law) == (
        None,
        True,
        chain.kernel.law if name == "independence" else "model",
    )
    assert 0 < found.acceptance <= 1


@dataclass
class Mutant:
    """Independence with another ratio."""

    ratio: str
    truncation: Truncation = ANCESTRAL

    @property
    def kernel(self):
        return Independence(truncation=self.truncation, law="model")

    def init(self, target, x):
        return self.kernel.init(target, x)

    def step(self, target, state, rng):
        new, now = self.kernel.propose(target, state.at.num, rng), state.at
        ratio = {
            "full weights": new.log_score - now.log_score,  # P'/P without q/q'
            "always": torch.zeros_like(new.energy),
            "no correction": now.energy - new.energy,  # e^{−E'}/e^{−E}, without P_LM/q
            "upside down": now.log_weight - new.log_weight,
            "squared": 2 * (new.log_weight - now.log_weight),
            "right": new.log_weight - now.log_weight,
        }[self.ratio][0]
        coins = accept(acceptance(ratio), rng.child("accept"))
        at = type(now).cat([now, new], dim=1).take(torch.arange(now.num) + now.num * coins)
        return IndependenceState(at), IndependenceInfo(coins, new.log_weight[0], new.tokens_drawn)


@pytest.mark.parametrize("ratio", ["full weights", "always", "no correction", "upside down", "squared"])
def test_a_wrong_ratio_is_refused(ratio):
    """Each by more than 1e-3 in a transition, where right ones are within 1e-12."""
    truncation = Truncation(temperature=0.6)
    world = World()
    check_kernel(Mutant("right", truncation), world.target(), probs=world.law("model", truncation))
    with pytest.raises(AssertionError, match="the target is invariant"):
        check_kernel(Mutant(ratio, truncation), world.target(), probs=world.law("model", truncation), tolerance=1e-3)


class Elsewhere:
    """A kernel that begins where it likes."""

    def init(self, target, x):
        return SingleSite().init(target, x.candidates(torch.zeros(x.shape[1], dtype=torch.long)))

    def step(self, target, state, rng):
        return SingleSite().step(target, state, rng)


class OneStream:
    """A kernel whose chains share one stream: in law as good as any, but a chain depends on its neighbours."""

    def init(self, target, x):
        return SingleSite().init(target, x)

    def step(self, target, state, rng):
        own = Rng(rng.seed, rng.path) if type(rng) is Rng else rng
        return SingleSite().step(target, state, own)


def test_chains_that_share_randomness_or_lose_their_place_are_refused():
    world = World(**FIXED)
    with pytest.raises(AssertionError, match="must own their randomness"):
        check_kernel(OneStream(), world.target())
    with pytest.raises(AssertionError, match="init does not keep the positions"):
        check_kernel(Elsewhere(), world.target())


def test_weights_of_zero():
    """Chains leave what is forbidden and never come back; P K = P with the rest."""
    for name, shape in (("independence", {}), ("single-site", FIXED)):
        world = World(**shape)
        world.energies[1] = math.inf
        check_kernel(sampler_named(name).kernel, world.target())
        found = sampler_named(name, {"steps": 30})(world.target(), 20, Rng(0))
        assert found.energy.isfinite().all()
