"""The matrices of benchmarks/autocorrelation.py are those of the kernels; its committed table holds."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from freenergy.samplers.kernels.combined import TextMixture
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.kernels.locally_balanced import DiscreteLangevin, LocallyBalanced
from freenergy.samplers.kernels.metropolis_hastings import MetropolisHastings
from freenergy.samplers.kernels.proposals import Site, Suffix
from freenergy.testing import World
from freenergy.testing.targets import transition_matrix

FOLDER = Path(__file__).parents[3] / "benchmarks"
SPEC = importlib.util.spec_from_file_location("benchmarks_autocorrelation", FOLDER / "autocorrelation.py")
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


def written_out():
    world = World(tokens=2, length=2, eos=None)
    x, score = world.x.tokens[0], world.log_base - world.energies
    own = SimpleNamespace(V=2, L=2, x=x, base=world.log_base, score=score, changed=bench.changed(x, 2))
    return world, own


def test_matrices_are_those_of_the_kernels():
    world, own = written_out()
    near = own.score[own.changed]
    exact = near - own.score.view(-1, 1, 1)
    whole = bench.corrected(own.base.exp().expand(4, 4).clone(), own.score)
    cloze = bench.corrected(bench.sites(own, own.base[own.changed]), own.score)
    for kernel, wanted in (
        (Independence(), whole),
        (MetropolisHastings(proposal=Site(by="cloze")), cloze),
        (TextMixture(), (whole + cloze) / 2),
        (MetropolisHastings(proposal=Suffix()), bench.corrected(bench.suffixes(own), own.score)),
        (Gibbs(), bench.sites(own, near)),
        (Gibbs(metropolised=True), bench.metropolised(own)),
        (LocallyBalanced(), bench.corrected(bench.balanced(own, exact), own.score)),
        (DiscreteLangevin(step_size=0.4), bench.corrected(bench.langevin(own, exact, 0.4), own.score)),
    ):
        found = transition_matrix(kernel, world.target())
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=str(kernel))


def test_tau_of_a_two_state_chain():
    """K = [[1 − a, a], [b, 1 − b]] has one other eigenvalue λ = 1 − a − b, so τ = (1 + λ)/(1 − λ)."""
    a, b = 0.1, 0.3
    K = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
    P = torch.tensor([b, a], dtype=torch.float64) / (a + b)
    own = SimpleNamespace(V=2, x=torch.tensor([[0], [1]]), score=P.log(), P=P)
    assert bench.worst_tau(own, K) == pytest.approx((1 + 0.6) / (1 - 0.6), abs=1e-12)


def test_the_default_is_never_far_from_the_best():
    """At most 2× the best kernel of each column of the committed table; unadjusted discrete Langevin is far off."""
    table = json.loads((FOLDER / "results" / "autocorrelation.json").read_text())
    assert len(table["columns"]) == 5
    assert max(table["default / best"].values()) <= 2
    assert max(table["unadjusted langevin 0.4: total variation"].values()) > 0.38
    assert bench.measure(quick=True)["default / best"]["pair 0.6"] <= 2
