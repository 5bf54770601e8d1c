"""Diagnostics of chains: good ones pass in silence, bad ones are named in words."""

import math
import re

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.samplers import diagnose, sampler_named, trace_chains
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.kernels.metropolis_hastings import MetropolisHastings
from freenergy.samplers.kernels.proposals import Site
from freenergy.testing import World


def test_independent_chains_pass_and_their_ess_is_their_number():
    """4 × 1,000 independent numbers: bulk ESS within 15 % of 4,000 (its error is some 5 %), R̂ below 1.01. Seeded."""
    found = diagnose({"a": Rng(1).normal(4, 1000)}, torch.full((4,), 0.5))
    assert found.ess_bulk["a"] == pytest.approx(4000, rel=0.15)
    assert found.tau["a"] == pytest.approx(1, rel=0.15)
    assert found.r_hat["a"] < 1.01
    assert found.verdict() == ""


def test_autocorrelation_is_found():
    """x_t = 0.9 x_{t−1} + noise has τ = (1 + 0.9)/(1 − 0.9) = 19."""
    noise, x = Rng(2).normal(8, 5000), torch.zeros(8, 5000, dtype=torch.float64)
    for t in range(1, 5000):
        x[:, t] = 0.9 * x[:, t - 1] + noise[:, t]
    assert diagnose({"x": x}).tau["x"] == pytest.approx(19, rel=0.2)


@pytest.mark.parametrize(
    ("values", "acceptance", "sentence"),
    [
        (Rng(1).normal(4, 200) + torch.arange(4.0).unsqueeze(1), [0.5] * 4, "chains disagree on a"),
        (torch.zeros(4, 200), [0.5] * 4, "a never changes"),
        (Rng(1).normal(4, 12), [0.5] * 4, "effective draws, fewer than 100"),
        (Rng(1).normal(4, 1000), [0.5, 0.5, 0.0, 0.5], r"1 of 4 chains never moved \(2\)"),
        (Rng(1).normal(4, 1000), [0.001] * 4, "of proposals are accepted"),
    ],
)
def test_bad_chains_are_named(values, acceptance, sentence):
    found = diagnose({"a": values.double()}, torch.tensor(acceptance))
    assert re.search(sentence, found.verdict())


def test_a_trace_keeps_every_chain():
    world = World(tokens=3, length=2, eos=None)
    target, x = world.target(), world.x.candidates(torch.arange(6))
    found = trace_chains(
        MetropolisHastings(proposal=Site(by="uniform")), target, x, steps=60, rng=Rng(3), burn_in=20, every=2,
        statistics={"log_score": lambda state: state.log_score, "first": lambda state: state.x.tokens[0, :, 0]},
    )  # fmt: skip
    assert {name: tuple(own.shape) for name, own in found.values.items()} == {"log_score": (6, 20), "first": (6, 20)}
    assert found.acceptance.shape == (6,)
    assert found.x.shape == (1, 6)
    assert set(found.diagnostics().r_hat) == {"log_score", "first"}
    alone = trace_chains(
        MetropolisHastings(proposal=Site(by="uniform")), target, x.candidates(slice(4, 5)), steps=60,
        rng=Shifted(Rng(3), 4), burn_in=20, every=2, statistics={"log_score": lambda state: state.log_score},
    )  # fmt: skip
    torch.testing.assert_close(alone.values["log_score"][0], found.values["log_score"][4], rtol=0, atol=1e-9)


class Shifted(Rng):
    """The stream of a batch that begins at a later candidate."""

    def __init__(self, rng, candidates):
        super().__init__(rng.seed, rng.path, (0, candidates))


def test_a_mean_along_chains_is_that_of_the_target():
    """Gibbs, 64 chains × 150 steps: the mean energy within five standard errors (by bulk ESS). Seeded."""
    world = World(tokens=3, length=2, eos=None)
    found = trace_chains(
        Gibbs(), world.target(), world.x.candidates(torch.zeros(64, dtype=torch.long)), steps=150, rng=Rng(5),
        burn_in=20, statistics={"energy": lambda state: world.energy(state.x)[0]},
    )  # fmt: skip
    values, mean = found.values["energy"], float(world.law() @ world.energies)
    error = values.std() / math.sqrt(found.diagnostics().ess_bulk["energy"])
    assert abs(values.mean() - mean) < 5 * error


def test_a_sampler_says_that_its_chains_have_not_mixed():
    """An energy with two deep wells: chains stay where they start."""
    world = World(tokens=3, length=2, eos=None)
    world.energies[:] = 30.0
    world.energies[0] = world.energies[-1] = 0.0
    world.energies[-1] = -2.0
    found = sampler_named("single-site", {"steps": 60, "proposal": "uniform"})(world.target(), 12, Rng(0))
    assert any("have not mixed" in note for note in found.notes)
    fine = sampler_named("independence", {"steps": 60})(World().target(), 12, Rng(0))
    assert not any("have not mixed" in note for note in fine.notes)


def test_nothing_to_diagnose_is_refused():
    with pytest.raises(UserError, match="trace at least one statistic"):
        diagnose({})
    with pytest.raises(UserError, match="make at least 4 steps"):
        diagnose({"a": torch.zeros(2, 3)})
    world = World()
    with pytest.raises(UserError, match="make more steps"):
        trace_chains(Independence(), world.target(), world.x, steps=5, rng=Rng(0), statistics={}, burn_in=5)
