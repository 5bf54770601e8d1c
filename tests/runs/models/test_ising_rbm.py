"""Ising and RBM against enumeration, printed digits and each other; their sweeps as transition matrices."""

import math

import pytest
import torch

from freenergy import Rng, Sequences, UserError
from freenergy.core.roles import Target
from freenergy.core.sequences import Continuations
from freenergy.models.ising import Ising, IsingPath
from freenergy.models.rbm import RBM, RBMPath
from freenergy.partition.annealed import Schedule, anneal, anneal_back, annealed_bounds
from freenergy.samplers.kernels.blocks import BlockGibbs
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.samplers.kernels.locally_balanced import LocallyBalanced
from freenergy.testing import World, branches, check_kernel

# side, T: log Z, mean correlation of neighbours, E|m|; J = 1, H = 0, open boundary
PRINTED = {
    (2, 5.0): (2.853578, 0.204754, 0.487101), (2, 2.5): (3.105029, 0.425923, 0.623315),
    (2, 2.4): (3.134047, 0.444610, 0.635222), (2, 2.3): (3.166998, 0.464837, 0.648159),
    (2, 2.0): (3.297642, 0.536344, 0.694231), (3, 5.0): (6.483045, 0.207790, 0.371683),
    (3, 2.5): (7.267653, 0.453408, 0.541507), (3, 2.4): (7.360546, 0.475540, 0.558848),
    (3, 2.3): (7.466547, 0.499684, 0.578038), (3, 2.0): (7.891525, 0.586030, 0.648606),
    (4, 5.0): (11.581577, 0.209355, 0.286086), (4, 2.5): (13.186573, 0.471161, 0.477851),
    (4, 2.4): (13.379989, 0.495966, 0.500150), (4, 2.3): (13.601542, 0.523221, 0.525277),
    (4, 2.0): (14.497711, 0.621623, 0.620509),
}  # fmt: skip


def configurations(space):
    strings = space.enumerate()
    return Continuations(Sequences.from_lists([[]]), strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))


def target(model):
    return Target(model, Sequences.from_lists([[]]), model.space)


@pytest.mark.parametrize(("side", "T"), PRINTED)
def test_ising_to_the_printed_digits(side, T):
    log_z, correlation, m = PRINTED[side, T]
    model = Ising.at_temperature(T, side=side)
    found = model.exact()
    assert found["log_partition"] == pytest.approx(log_z, abs=5e-7)
    assert found["correlation"] == pytest.approx(correlation, abs=5e-7)
    assert found["abs_magnetisation"] == pytest.approx(m, abs=5e-7)
    assert model.log_partition() == pytest.approx(found["log_partition"], abs=1e-10)


@pytest.mark.parametrize("boundary", ["open", "periodic"])
def test_transfer_matrices_with_a_field(boundary):
    for side in (2, 3, 4):
        model = Ising(side=side, beta=0.37, coupling=-0.8, field=0.3, boundary=boundary)
        assert model.log_partition() == pytest.approx(model.exact()["log_partition"], abs=1e-10)


def test_periodic_means_of_the_packed_lattice():
    """The reference of bit-packed chains: Σ x_i x_j = 22.06587 and |Σ x_i| = 12.23540 at β = 0.4."""
    found = Ising(side=4, beta=0.4, boundary="periodic").exact()
    assert found["edges"] == pytest.approx(22.06587, abs=1e-5)
    assert 16 * found["abs_magnetisation"] == pytest.approx(12.23540, abs=1e-5)


def test_the_derivative_of_log_z_is_a_mean():
    """d log Z / d β = E[log_score] / β, with a field too."""
    step, settings = 1e-5, {"side": 3, "coupling": 1.0, "field": 0.2}
    up, down = (Ising(beta=0.3 + move, **settings).log_partition() for move in (step, -step))
    model = Ising(beta=0.3, **settings)
    scores = model.log_score(configurations(model.space))[0]
    assert (up - down) / (2 * step) == pytest.approx(float(scores.softmax(0) @ scores) / 0.3, abs=1e-8)


def test_kernels_leave_a_lattice_invariant():
    """2 × 2 spins, 16 states; a sweep is not reversible. The local field is the full conditional."""
    model = Ising(side=2, beta=0.6, field=0.2)
    check_kernel(BlockGibbs(), target(model), is_reversible=False)
    check_kernel(Gibbs(), target(model))
    check_kernel(LocallyBalanced(gradient=True), target(model))
    x = configurations(model.space)
    for site in range(4):
        other = x.tokens.clone()
        other[:, :, site] = 1 - other[:, :, site]
        gap = model.log_score(Continuations(x.contexts, other, x.lengths))[0] - model.log_score(x)[0]
        both = model.site_scores(x, torch.full((16,), site))
        own = x.tokens[0, :, site]
        torch.testing.assert_close(
            both.gather(1, (1 - own).unsqueeze(1))[:, 0] - both.gather(1, own.unsqueeze(1))[:, 0],
            gap,
            rtol=0,
            atol=1e-12,
        )


def double(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def machine(visible=2, hidden=2):
    rbm = RBM(visible=visible, hidden=hidden, rng=Rng(3), scale=1.0)
    with torch.no_grad():
        if (visible, hidden) == (2, 2):
            rbm.weights.copy_(double([[0.5, -1.0], [1.0, 0.25]]))
            rbm.visible_bias.copy_(double([0.1, -0.2]))
            rbm.hidden_bias.copy_(double([0.3, -0.4]))
    return rbm


def test_rbm_to_the_printed_digits():
    rbm = machine()
    W, b, a = (own.detach() for own in (rbm.weights, rbm.visible_bias, rbm.hidden_bias))
    both = [
        float(v @ W @ h + b @ v + a @ h)
        for v in torch.cartesian_prod(*[torch.arange(2.0).double()] * 2)
        for h in torch.cartesian_prod(*[torch.arange(2.0).double()] * 2)
    ]
    assert rbm.log_partition().item() == pytest.approx(3.1730701785667, abs=1e-12)
    assert double(both).logsumexp(0).item() == pytest.approx(3.1730701785667, abs=1e-12)
    x = configurations(rbm.space)
    assert rbm.log_score(x)[0].logsumexp(0).item() == pytest.approx(3.1730701785667, abs=1e-12)


@pytest.mark.parametrize(("visible", "hidden"), [(3, 5), (5, 3)])
def test_log_z_by_either_layer(visible, hidden):
    rbm = machine(visible, hidden)
    x = configurations(rbm.space)
    torch.testing.assert_close(rbm.log_partition(), rbm.log_score(x)[0].logsumexp(0), rtol=0, atol=1e-12)


def test_fisher_equality_of_the_machine():
    """E_P[∂ log P(v)] = 0 (B.7), and ∂ log P(v) = E_{h given v}[…] − E_P[…] (B.8) by autograd against the formula."""
    rbm = machine(3, 2)
    v = rbm.space.enumerate().tokens.double()
    p = rbm.log_prob(v).exp().detach()
    mean = torch.autograd.grad((p * rbm.log_prob(v)).sum(), list(rbm.parameters()))
    assert max(own.abs().max().item() for own in mean) < 1e-12
    with torch.no_grad():
        expected = torch.einsum("n,ni,nj->ij", p, v, rbm.hidden_probs(v))
        formula = torch.outer(v[5], rbm.hidden_probs(v[5])) - expected
    found = torch.autograd.grad(rbm.log_prob(v[5]), rbm.weights)[0]
    torch.testing.assert_close(found, formula, rtol=0, atol=1e-12)


def test_hidden_units_are_independent_given_the_visible_only():
    rbm = machine()
    with torch.no_grad():
        v = rbm.space.enumerate().tokens.double()
        p, h = rbm.log_prob(v).exp(), rbm.hidden_probs(v)
    joint, apart = float(p @ (h[:, 0] * h[:, 1])), float(p @ h[:, 0]) * float(p @ h[:, 1])
    assert abs(joint - apart) > 1e-3


def test_a_sweep_of_the_machine_is_reversible_in_v():
    check_kernel(BlockGibbs(), target(machine()))


@pytest.mark.parametrize("name", ["ising", "rbm"])
def test_annealed_weights_are_unbiased_in_both_directions(name):
    """E[w] = Z forward and E[1/w] = 1/Z in reverse, by every branch; a checkerboard is swept backwards for that."""
    if name == "ising":
        model = Ising(side=2, beta=0.5, field=0.1)
        path, log_z = IsingPath(model), model.log_partition()
    else:
        model = machine()
        path, log_z = RBMPath(model, double([0.3, -0.1])), model.log_partition().item()
    schedule, start = Schedule(temperatures=2), path.log_partition_start
    if name == "rbm":
        mean = math.fsum(
            p * math.exp(w.item() + start) for p, w in branches(lambda rng: anneal(path, schedule, 1, rng)[0])
        )
        assert mean == pytest.approx(math.exp(log_z), rel=1e-12)
    x = configurations(model.space)
    with torch.no_grad():
        P = (model.log_score(x)[0] - log_z).exp()

    def inverse(own):
        total = 0.0
        for i, p in enumerate(P.tolist()):
            one = x.candidates(torch.tensor([i]))
            found = branches(lambda rng, one=one: anneal_back(own, schedule, one, rng))
            total += p * math.fsum(chance * math.exp(-w.item() - start) for chance, w in found)
        return total

    assert inverse(path) == pytest.approx(math.exp(-log_z), rel=1e-12)


@pytest.mark.statistical
def test_bounds_bracket_the_machine():
    """Seeded: 12 units, 200 chains, 50 temperatures; both sides within 0.1 of the exact log Z."""
    rbm = machine(6, 6)
    x = configurations(rbm.space)
    with torch.no_grad():
        log_p = rbm.log_prob(x.tokens[0])
        draws = x.candidates(Rng(1).categorical(log_p.expand(200, -1)))
        path = RBMPath(rbm, torch.zeros(6).double())
        found = annealed_bounds(path, draws, chains=200, rng=Rng(2), schedule=Schedule(temperatures=50))
    exact = rbm.log_partition().item()
    assert found.lower - 0.1 < exact < found.upper + 0.1
    assert found.gap < 0.2
    assert found.verdict() == ""


def test_bad_input_is_refused():
    for make, sentence in (
        (lambda: Ising.at_temperature(0.0, side=3), "temperature is 0.0: set it above 0"),
        (lambda: Ising(side=1, beta=1.0), "side is 1: set it to 2 or more"),
        (lambda: Ising(side=3, beta=-1.0), "beta is -1.0"),
        (lambda: Ising(side=3, beta=1.0, boundary="periodic").check_colours(), "has no checkerboard"),
        (lambda: Ising(side=20, beta=1.0).log_partition(), "exact sums reach side 14"),
        (lambda: Ising(side=5, beta=1.0).exact(), "by enumeration reach side 4"),
        (lambda: Ising(side=3, beta=1.0).log_score(configurations(Ising(side=2, beta=1.0).space)), "4 spins for"),
        (lambda: RBM(visible=0, hidden=1, rng=Rng(0)), "at least one of each"),
        (lambda: RBM(visible=30, hidden=30, rng=Rng(0)).log_partition(), "is too long"),
        (lambda: BlockGibbs().init(World().target(), World().x), "has no blocks of its own"),
    ):
        with pytest.raises(UserError, match=sentence):
            make()
