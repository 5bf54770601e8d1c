"""E-ARM by enumeration: a table of logits after every beginning, so that the expectations of Eq. 6–16 are sums."""

import itertools
import math

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.objectives.earm import EARM, Denominators, Steps

V, K = 3, 3
BEGINNINGS = [p for k in range(K) for p in itertools.product(range(V), repeat=k)]  # every x_<k, k = 1 … K
ROW = {p: i for i, p in enumerate(BEGINNINGS)}
STRINGS = torch.tensor(list(itertools.product(range(V), repeat=K)))


def table(seed=0, spread=1.0):
    """θ: the logits after every beginning."""
    return (spread * Rng(seed).normal(len(BEGINNINGS), V)).requires_grad_()


def logits_of(theta, strings):
    """[rows, K, V]."""
    index = torch.tensor([[ROW[tuple(x[:k])] for k in range(strings.shape[1])] for x in strings.tolist()])
    return theta[index]


def steps_of(theta, strings=STRINGS, mask=None):
    mask = torch.ones_like(strings, dtype=torch.bool) if mask is None else mask
    return Steps.of(logits_of(theta, strings), strings, mask)


def law(theta):
    """q(x) of every string."""
    return steps_of(theta).log_prob.sum(1).exp()


def data_law(seed=5):
    return Rng(seed).normal(len(STRINGS)).mul(1.5).softmax(0)


def exact_log_z(theta):
    """log Z_k = log Σ_x q(x_<k) e^{S(x_<k)}."""
    q, S = law(theta), steps_of(theta).log_sum
    return (q.unsqueeze(1) * S.exp()).sum(0).log()


def kl_objective(theta, p_data, lambdas):
    """Eq. 6 but for the data's entropy, straight from its definition: −E_d log p_k(x_k, x_<k), p_k by Eq. 4."""
    steps, total = steps_of(theta), 0.0
    for k in range(K):
        log_p = steps.log_prob[:, :k].sum(1) + steps.logit[:, k]  # log q(x_<k) + f(x_k; x_<k)
        beginnings = {tuple(x[: k + 1]): i for i, x in enumerate(STRINGS.tolist())}  # each (x_<k, x_k) once
        log_z = log_p[list(beginnings.values())].logsumexp(0)
        total = total - lambdas[k] * (p_data * (log_p - log_z)).sum()
    return total / K


def population(settings, theta, p_data, log_z=None):
    """The expectation of the objective's gradient over data x and fakes y, one row of each at a time.

    The value is a sum of a part of x and a part of y, so that two walks with the other row fixed are all pairs.
    """
    log_z = exact_log_z(theta).detach() if log_z is None else log_z
    q, every, last = law(theta).detach(), steps_of(theta), len(STRINGS) - 1

    def value(x, y):
        return settings(*(Steps(every.logit[[i]], every.log_sum[[i]], every.mask[[i]]) for i in (x, y)), log_z).value

    assert (value(3, 5) - value(3, 7)).item() == pytest.approx((value(8, 5) - value(8, 7)).item(), abs=1e-12)
    over_x = sum(p_data[x] * value(x, 0) for x in range(last + 1))
    over_y = sum(q[y] * value(0, y) for y in range(last + 1))
    return torch.autograd.grad(over_x + over_y - value(0, 0), theta)[0]


def beginning_law(p, k):
    """The law of x_<k, of each string's own beginning."""
    index = torch.tensor([ROW[tuple(x[:k])] for x in STRINGS.tolist()])
    return torch.zeros(len(BEGINNINGS)).to(p).index_add(0, index, p)[index]


def donsker_varadhan(theta, p_data, k, log_sum=None):
    """E_data S(x_<k) − log E_q e^{S(x_<k)}, at most KL(data ‖ q) of beginnings x_<k."""
    S = steps_of(theta).log_sum[:, k] if log_sum is None else log_sum
    return (p_data * S).sum() - (law(theta) * S.exp()).sum().log()


@pytest.mark.parametrize("k", range(K))
def test_a_step_is_cross_entropy_less_a_bound_on_the_divergence(k):
    """Eq. 6 at step k = −E_data log q(x_≤k) − {E_data S − log E_q e^S}: S relaxes what is asked of q(x_<k)."""
    theta, p_data = table(1), data_law()
    lambdas = [float(j == k) for j in range(K)]
    ours = K * kl_objective(theta, p_data, lambdas)
    cross_entropy = -(p_data * steps_of(theta).log_prob[:, : k + 1].sum(1)).sum()
    bound = donsker_varadhan(theta, p_data, k)
    assert ours.item() == pytest.approx((cross_entropy - bound).item(), abs=1e-12)
    # the bound is one, and S = log(data/q) + c, which is its optimum, makes it the divergence of the beginnings
    p, q = beginning_law(p_data, k), beginning_law(law(theta), k)
    divergence = (p_data * (p / q).log()).sum().item()
    assert bound.item() <= divergence + 1e-12
    best = donsker_varadhan(theta, p_data, k, (p / q).log() + 0.7)
    assert best.item() == pytest.approx(divergence, abs=1e-12)
    # what is left is then the entropy of the beginnings, which q does not move, and the last conditional
    entropy = -(p_data * p.log()).sum()
    last = -(p_data * steps_of(theta).log_prob[:, k]).sum()
    assert (cross_entropy - best).item() == pytest.approx((entropy + last).item(), abs=1e-12)
    assert k == 0 or divergence > 0.05  # there is something to bound


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("lambdas", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.0)])
def test_the_expected_gradient_is_that_of_the_divergence(reduced, lambdas):
    """Eq. 15 against Eq. 6, without truncation (m = K)."""
    theta, p_data = table(), data_law()
    settings = EARM(length=K, recent=K, step_weights=lambdas, reduced=reduced)
    (exact,) = torch.autograd.grad(kl_objective(theta, p_data, lambdas), theta)
    found = population(settings, theta, p_data)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
    assert exact.abs().max() > 0.01


def test_weights_of_one_are_noticed():
    """A mutant that leaves w out of the negative phase must not pass the test above."""
    theta, p_data = table(), data_law()
    (exact,) = torch.autograd.grad(kl_objective(theta, p_data, (1.0,) * K), theta)
    steps = steps_of(theta)
    flat = population(EARM(length=K, recent=K), theta, p_data, log_z=steps.log_sum.mean(0).detach())
    assert (flat - exact).abs().max() > 1e-3


@pytest.mark.parametrize("recent", [0, 1, 2])
@pytest.mark.parametrize("reduced", [False, True])
def test_truncation_is_a_stop_gradient_and_nothing_else(recent, reduced):
    """q̃ written out: a fixed copy of θ in all but the last m conditionals."""
    theta, p_data = table(1), data_law(2)
    copy = theta.detach()
    moving, fixed, q = steps_of(theta), steps_of(copy), law(copy)
    w, total = (fixed.log_sum - exact_log_z(copy)).exp(), torch.zeros(())
    for k in range(K):
        before = moving.log_prob[:, max(0, k - recent) : k].sum(1) + fixed.log_prob[:, : max(0, k - recent)].sum(1)
        log_p = before + moving.logit[:, k]
        total = total + ((q * w[:, k] - p_data) * log_p).sum() / K
    (exact,) = torch.autograd.grad(total, theta)
    found = population(EARM(length=K, recent=recent, reduced=reduced), theta, p_data)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
    whole = population(EARM(length=K, recent=K), theta, p_data)
    assert (found - whole).abs().max() > 1e-4 or recent >= K - 1


def test_the_gradient_vanishes_where_the_model_is_the_data():
    """S constant after beginnings of one length and P_d = q: then p_k = P_d at every step."""
    theta = table(3).detach().log_softmax(-1).requires_grad_()
    for recent, reduced in ((0, False), (2, True), (K, False)):
        settings = EARM(length=K, recent=recent, reduced=reduced)
        found = population(settings, theta, law(theta).detach())
        assert found.abs().max() < 1e-12
    assert population(EARM(length=K), theta, data_law()).abs().max() > 0.01


def rational_world():
    """Conditionals in quarters, so that 64 rows hold every string exactly as often as q says; rows may end early."""
    counts = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 2.0], [1.0, 2.0, 1.0], [2.0, 1.0, 1.0]]).double()
    theta = torch.zeros(len(BEGINNINGS), V, dtype=torch.float64)
    for p, i in ROW.items():
        theta[i] = (counts[(sum(p) + len(p)) % 4] / 4).log() + 0.3 * Rng(9).child(i).normal(1)
    q = law(theta.detach()) * 4**K
    assert torch.allclose(q, q.round(), atol=1e-9)
    return theta.requires_grad_(), torch.repeat_interleave(STRINGS, q.round().long(), dim=0)


def test_weights_average_to_one_over_the_model():
    theta, fakes = rational_world()
    steps = steps_of(theta, fakes)
    log_z = Denominators(K, decay=0.0).update(steps)
    torch.testing.assert_close(log_z, exact_log_z(theta).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close((steps.log_sum - log_z).exp().mean(0), torch.ones(K).double(), rtol=0, atol=1e-12)
    assert steps.log_sum.std(0).max() > 0.1


def test_a_batch_that_is_the_population_gives_the_exact_gradient():
    theta, fakes = rational_world()
    data = STRINGS[[0, 4, 4, 7, 20, 26]]
    p_data = torch.tensor([(data == x).all(1).double().mean() for x in STRINGS])
    drawn = steps_of(theta, fakes)
    value = EARM(length=K, recent=K)(steps_of(theta, data), drawn, Denominators(K, 0.0).update(drawn)).value
    (found,) = torch.autograd.grad(value, theta)
    (exact,) = torch.autograd.grad(kl_objective(theta, p_data, (1.0,) * K), theta)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_rows_that_end_take_no_part_in_later_steps():
    """Token 0 ends a row: step k is then about beginnings without a 0, for data and fakes alike."""
    theta, fakes = rational_world()
    data = STRINGS[[0, 4, 13, 14, 22, 26]]

    def alive(rows):
        return torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), (rows[:, :-1] != 0).cumprod(1).bool()], dim=1)

    drawn, seen = steps_of(theta, fakes, alive(fakes)), steps_of(theta, data, alive(data))
    settings = EARM(length=K, recent=K)
    (found,) = torch.autograd.grad(settings(seen, drawn, Denominators(K, 0.0).update(drawn)).value, theta)
    every, total = steps_of(theta), 0.0
    for k in range(K):
        living = torch.tensor([0 not in x[:k] for x in STRINGS.tolist()])
        once = list({tuple(x[: k + 1]): i for i, x in enumerate(STRINGS.tolist()) if living[i]}.values())
        log_p = every.log_prob[:, :k].sum(1) + every.logit[:, k]
        here = [int((x == STRINGS).all(1).nonzero()) for x in data[alive(data)[:, k]]]
        total = total - (log_p[here] - log_p[once].logsumexp(0)).sum() / alive(data).sum()
    (exact,) = torch.autograd.grad(total, theta)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_a_step_that_only_one_side_reaches_is_left_out():
    theta = table()
    rows, none = STRINGS[:4], torch.ones(4, K, dtype=torch.bool)
    short = none.clone()
    short[:, 1:] = False
    for data, fakes in ((none, short), (short, none)):
        drawn = steps_of(theta, rows, fakes)
        value = EARM(length=K, recent=0)(steps_of(theta, rows, data), drawn, Denominators(K, 0.0).update(drawn)).value
        (slope,) = torch.autograd.grad(value, theta)
        assert slope[1:].abs().max() == 0  # beginnings of a token or more
        assert math.isfinite(value.item())


def test_denominators_are_an_average_over_batches():
    batches = [Rng(i).normal(5, K) for i in range(4)]
    kept, found = Denominators(K, decay=0.6), None
    for S in batches:
        found = kept.update(Steps(S, S, torch.ones(5, K, dtype=torch.bool)))
    z = batches[0].exp().mean(0)
    for n, S in enumerate(batches[1:], 1):
        d = min(0.6, n / (n + 1))
        z = d * z + (1 - d) * S.exp().mean(0)
    torch.testing.assert_close(found, z.log(), rtol=0, atol=1e-12)
    empty = Steps(batches[0], batches[0], torch.zeros(5, K, dtype=torch.bool))
    assert kept.update(empty).equal(found)  # no row, nothing to take in


def test_the_parts_are_what_they_are_called():
    """Their gradients add up to Eq. 15 as it stands in the paper, and the noise has mean zero over the model."""
    theta, fakes = rational_world()
    data, drawn = steps_of(theta, STRINGS[[0, 4, 7]]), steps_of(theta, fakes)
    settings, log_z = EARM(length=K, recent=1), Denominators(K, 0.0).update(drawn)
    w = (drawn.log_sum - log_z).exp().detach()
    before = [torch.nn.functional.pad(steps.log_prob[:, :-1], (1, 0)) for steps in (data, drawn)]
    paper = (w * (before[1] + drawn.logit)).mean(0).mean() - (before[0] + data.logit).mean(0).mean()
    parts = settings.parts(data, drawn, log_z)
    total = parts.cross_entropy + parts.level + parts.reweighted_prefix_term + parts.noise
    slopes = {}
    for name, value in {"paper": paper, "total": total, "noise": parts.noise, "level": parts.level}.items():
        (slopes[name],) = torch.autograd.grad(value, theta, retain_graph=True)
    torch.testing.assert_close(slopes["total"], slopes["paper"], rtol=0, atol=1e-12)
    assert slopes["noise"].abs().max() < 1e-12  # the fakes are the population
    assert slopes["level"].abs().max() > 1e-3
    assert parts.cross_entropy.item() == pytest.approx(-(before[0] + data.log_prob).mean().item())


def test_less_noise_with_the_same_mean():
    """``reduced``: over pairs of one row each, the variance of the gradient falls."""
    theta, p_data = table(spread=0.5), data_law()
    log_z, every, spread = exact_log_z(theta).detach(), steps_of(theta), {}
    q = law(theta).detach()
    for reduced in (False, True):
        mean, square = torch.zeros_like(theta), torch.zeros_like(theta)
        for y in range(len(STRINGS)):
            one = [Steps(every.logit[[i]], every.log_sum[[i]], every.mask[[i]]) for i in (0, y)]
            value = EARM(length=K, reduced=reduced)(*one, log_z).value
            (slope,) = torch.autograd.grad(value, theta, retain_graph=True)
            mean, square = mean + q[y] * slope, square + q[y] * slope**2
        spread[reduced] = float((square - mean**2).sum())
    assert spread[True] < 0.5 * spread[False]
    assert p_data.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"length": 0}, "1 or more fake tokens"),
        ({"length": 4, "recent": 5}, "recent is 5"),
        ({"recent": -1}, "recent is -1"),
        ({"weight": 0.0}, "weight"),
        ({"decay": 1.0}, "decay"),
        ({"start_epoch": -1.0}, "start_epoch"),
        ({"length": 3, "recent": 1, "step_weights": (1.0, 1.0)}, "step_weights"),
    ],
)
def test_senseless_settings_are_refused(settings, word):
    with pytest.raises(UserError, match=word):
        EARM(**settings)
