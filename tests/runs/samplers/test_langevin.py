"""Real-valued kernels: closed forms of bias, acceptance by a second derivation, invariance of exact starts."""

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from freenergy import Rng, UserError
from freenergy.samplers.kernels.langevin import SGLD, HamiltonianMonteCarlo, Langevin, points
from freenergy.samplers.registry import REAL_KERNELS

ALPHA = 1e-6  # false-failure rate of each statistical test here; seeded, so it fails always or never on one machine
CHAINS = 4000
ROWS = {
    "langevin": Langevin(step_size=0.9),
    "hamiltonian": HamiltonianMonteCarlo(step_size=0.5, leaps=3),
    "sgld": SGLD(step_size=0.2, decay=0.0),
}


class Normal:
    """N(0, 1) in every coordinate."""

    def log_score(self, x):
        return -x.values.square().sum((-1, -2)) / 2


class Noisy(Normal):
    """The same with a gradient that has noise of variance 4."""

    def noisy_gradient(self, x, rng):
        return -x.values[0] + 2 * rng.rows(1, x.shape[1], 1).normal(1)[0].unsqueeze(-1)


class Skewed:
    """log of an extreme-value density, whose sign matters: x = −log(−log u)."""

    def log_score(self, x):
        y = x.values.sum((-1, -2))
        return -y - (-y).exp()


class TwoHumps:
    """A mixture of two normal densities at ±1."""

    def log_score(self, x):
        y = x.values.sum((-1, -2))
        return torch.logaddexp(-(y - 1).square() + 0.4, -(y + 1).square())


def double(*rows):
    return points(torch.tensor(rows, dtype=torch.float64))


def test_every_real_kernel_has_a_row():
    assert set(ROWS) == set(REAL_KERNELS)


def affine(kernel, target):
    """Return a and the noise of x' = a x + noise, of which the step is made on a normal density."""
    at = [kernel.step(target, kernel.init(target, double([x])), Rng(4))[0].values.item() for x in (0.0, 1.0)]
    return at[1] - at[0], at[0]


@pytest.mark.parametrize(("sigma", "variance"), [(0.5, 1.0667), (1.0, 1.3333), (1.5, 2.2857)])
def test_the_variance_of_unadjusted_langevin(sigma, variance):
    """x' = (1 − σ²/2) x + σ ε exactly, so the variance is σ²/(1 − (1 − σ²/2)²) = 1/(1 − σ²/4)."""
    a, noise = affine(Langevin(step_size=sigma, is_adjusted=False), Normal())
    eps = Rng(4).child("draw").rows(1, 1, 1).normal(1).item()
    assert a == pytest.approx(1 - sigma**2 / 2, abs=1e-12)
    assert noise / eps == pytest.approx(sigma, abs=1e-12)
    assert (noise / eps) ** 2 / (1 - a**2) == pytest.approx(1 / (1 - sigma**2 / 4), abs=1e-12)
    assert (noise / eps) ** 2 / (1 - a**2) == pytest.approx(variance, abs=5e-5)


def test_the_variance_of_sgld():
    """x' = (1 − δ) x + δ s ξ + √(2δ) ε: (2 + δ s²)/(2 − δ), 1.5556 at δ = 0.2 and s² = 4."""
    a, noise = affine(SGLD(step_size=0.2, decay=0.0), Noisy())
    eps = Rng(4).child("draw").rows(1, 1, 1).normal(1).item()
    xi = Rng(4).child("gradient").rows(1, 1, 1).normal(1).item()
    assert a == pytest.approx(0.8, abs=1e-12)
    assert noise == pytest.approx(0.2 * 2 * xi + math.sqrt(0.4) * eps, abs=1e-12)
    assert (0.2**2 * 4 + 0.4) / (1 - a**2) == pytest.approx((2 + 0.2 * 4) / (2 - 0.2), abs=1e-12)
    assert pytest.approx(1.5556, abs=5e-5) == (2 + 0.2 * 4) / (2 - 0.2)
    shrinking = SGLD(step_size=0.2, decay=1.0, offset=10.0)
    assert [round(shrinking.delta(t), 6) for t in (0, 10, 90)] == [0.2, 0.1, 0.02]


@pytest.mark.parametrize("target", [Normal(), Skewed(), TwoHumps()], ids=lambda own: type(own).__name__)
def test_the_acceptance_of_mala_is_that_of_hastings(target):
    """From the definition, with scipy's normal density; and one leap of the Hamiltonian kernel is the same step."""
    kernel, x = Langevin(step_size=0.7), double([0.3], [-0.4], [2.0])
    before = kernel.init(target, x)
    _, info = kernel.step(target, before, Rng(2))
    eps = Rng(2).child("draw").rows(1, 3, 1).normal(1)[0].numpy()[:, 0]
    old, g = before.values[:, 0, 0].numpy(), before.gradient[:, 0, 0].numpy()
    new = old + 0.245 * g + 0.7 * eps
    at = kernel.init(target, double(*[[float(y)] for y in new]))
    q_forth = stats.norm.logpdf(new, old + 0.245 * g, 0.7)
    q_back = stats.norm.logpdf(old, new + 0.245 * at.gradient[:, 0, 0].numpy(), 0.7)
    log_r = at.log_score.numpy() - before.log_score.numpy() + q_back - q_forth
    assert info.acceptance.tolist() == pytest.approx([min(1, math.exp(r)) for r in log_r], abs=1e-12)
    one_leap = HamiltonianMonteCarlo(step_size=0.7, leaps=1).step(target, before, Rng(2))[1]
    torch.testing.assert_close(one_leap.acceptance, info.acceptance, rtol=0, atol=1e-12)


def test_acceptance_goes_to_one_with_the_step():
    rates = []
    for sigma in (1.0, 0.3, 0.03):
        kernel = Langevin(step_size=sigma)
        state = kernel.init(Skewed(), points(Rng(1).normal(200, 1)))
        rates.append(kernel.step(Skewed(), state, Rng(3))[1].acceptance.mean().item())
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 0.999


def from_exact(kernel, steps=3):
    """Chains that start in the skewed law, after some steps, as uniform numbers if the law is unchanged."""
    u = Rng(6).uniform(CHAINS, 1)
    state = kernel.init(Skewed(), points(-(-u.log()).log()))
    for t in range(steps):
        state, _ = kernel.step(Skewed(), state, Rng(7).child(t))
    return stats.kstest((-(-state.values[:, 0, 0]).exp()).exp().numpy(), "uniform").pvalue


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["langevin", "hamiltonian"])
def test_an_exact_start_stays_exact(name):
    """4,000 chains, false failures at 1e-6. Mutant: the unadjusted step of the same size, at p < 1e-6."""
    assert from_exact(ROWS[name]) > ALPHA
    assert from_exact(Langevin(step_size=0.9, is_adjusted=False)) < ALPHA


@pytest.mark.statistical
def test_two_humps_against_quadrature():
    """MALA from a wide start: shares of 8 bins after 60 steps, χ² at 1e-6."""
    kernel, grid = Langevin(step_size=1.0), torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    mass = TwoHumps().log_score(points(grid.unsqueeze(1)))[0].softmax(0)
    edges = torch.tensor([-6.0, -1.9, -1.5, -1.1, 0.0, 1.1, 1.5, 1.9, 6.0]).double()
    wanted = torch.stack([mass[(grid >= a) & (grid < b)].sum() for a, b in pairwise(edges)])
    state = kernel.init(TwoHumps(), points(2 * Rng(8).normal(CHAINS, 1)))
    for t in range(60):
        state, _ = kernel.step(TwoHumps(), state, Rng(9).child(t))
    found = torch.histogram(state.values[:, 0, 0], edges).hist
    assert found.sum() == CHAINS
    assert stats.chisquare(found.numpy(), (wanted / wanted.sum() * CHAINS).numpy()).pvalue > ALPHA


@pytest.mark.parametrize("name", ROWS)
def test_chains_own_their_noise(name):
    kernel, target = ROWS[name], Normal()
    x = Rng(1).normal(5, 3)
    together = kernel.step(target, kernel.init(target, points(x)), Rng(2))[0].values
    alone = kernel.step(target, kernel.init(target, points(x[3:4])), Rng(2).shift(candidates=3))[0].values
    torch.testing.assert_close(alone[0], together[3], rtol=0, atol=1e-12)


def test_bad_settings_and_starts_are_refused():
    for make in (lambda: Langevin(step_size=0.0), lambda: SGLD(step_size=-1.0), lambda: HamiltonianMonteCarlo(leaps=0)):
        with pytest.raises(UserError, match="set it"):
            make()
    with pytest.raises(UserError, match="chain 1 is where the log-density is nan"):
        Langevin().init(Normal(), double([0.0], [math.nan]))
