import numpy as np
import pytest
import torch
from scipy import stats

from freenergy import Rng
from freenergy.core.rng import Rows, choose
from freenergy.testing import EnumeratingRng, branches, law

FALSE_FAILURE_RATE = 1e-6  # of each statistical test here; the suite's budget is 1e-4


def test_a_name_gives_the_same_bits_in_any_order():
    a, b = Rng(3).child("step", 1).uniform(4), Rng(3).child("step", 2).uniform(4)
    assert torch.equal(b, Rng(3).child("step", 2).uniform(4))
    assert torch.equal(a, Rng(3).child("step", 1).uniform(4))
    assert not torch.equal(a, b)
    assert not torch.equal(a, Rng(4).child("step", 1).uniform(4))


def test_rows_belong_to_candidates():
    whole = Rng(1).rows(4, 6, 7)._u
    part = Rng(1).shift(contexts=2, candidates=3).rows(2, 3, 7)._u
    assert torch.equal(part, whole[2:, 3:])
    assert torch.equal(part, Rng(1).shift(contexts=2).shift(candidates=3).rows(2, 3, 7)._u)
    assert len(set(whole.flatten().tolist())) == whole.numel()
    children = Rng(1).child(0).uniform(7)
    assert not torch.equal(children, whole[0, 0])


@pytest.mark.parametrize("vocabulary", [1, 3, 256, 257, 1000])
def test_choose_inverts_the_cumulative_sum(vocabulary):
    generator = np.random.default_rng(vocabulary)
    p = generator.dirichlet(np.ones(vocabulary))
    p[generator.random(vocabulary) < 0.3] = 0
    p[-1] = max(p[-1], 0.01)
    p /= p.sum()
    u = generator.random(5000)
    wanted = np.searchsorted(np.cumsum(p), u, side="right").clip(max=vocabulary - 1)
    log_p = torch.tensor(p).log().expand(5000, vocabulary)
    found = choose(log_p, torch.tensor(u)).numpy()
    assert (found != wanted).mean() < 1e-3  # only where rounding decides
    assert (p[found] > 0).all()


def test_choose_at_the_edges():
    log_p = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).double()
    edges = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert choose(log_p.expand(4, 5), edges).tolist() == [1, 1, 3, 3]


@pytest.mark.statistical
@pytest.mark.parametrize("mutant", [False, True])
def test_categorical_has_the_right_law(mutant):
    """χ² at a false-failure rate of 1e-6; a law that is 5 % off in total variation must be rejected."""
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    drawn = Rng(12).categorical(torch.tensor(p).log().expand(40_000, 5)).numpy()
    claimed = p + 0.05 * np.array([1, -1, 0, 0, 0]) if mutant else p
    observed = np.bincount(drawn, minlength=5)
    p_value = stats.chisquare(observed, claimed * len(drawn)).pvalue
    assert (p_value < FALSE_FAILURE_RATE) == mutant


def test_branches_are_walked_once_each():
    found = list(branches(lambda rng: rng.permutation(3).tolist()))
    assert len(found) == 6
    assert sum(p for p, _ in found) == pytest.approx(1, abs=1e-15)
    assert len({tuple(order) for _, order in found}) == 6


def test_law_of_a_sum_of_coins():
    probs = torch.tensor([0.25, 0.5], dtype=torch.float64)
    exact = law(lambda rng: rng.child("coins").bernoulli(probs), lambda coins: int(coins.sum()))
    assert exact == pytest.approx({0: 0.375, 1: 0.5, 2: 0.125}, abs=1e-15)


def test_what_cannot_be_enumerated_says_so():
    with pytest.raises(NotImplementedError, match="cannot be enumerated"):
        law(lambda rng: rng.uniform(1), lambda u: float(u))


def test_normal_rows_belong_to_the_candidate():
    whole = Rng(3).rows(3, 4, 6)
    first, then = whole.normal(2), whole.normal(4)
    part = Rng(3).shift(contexts=1, candidates=2).rows(1, 2, 6)
    assert torch.equal(part.normal(2), first[1:2, 2:])
    assert torch.equal(part.normal(4), then[1:2, 2:])
    assert not torch.equal(first, then[..., :2])
    u = Rng(3).rows(3, 4, 6).uniform(1)
    torch.testing.assert_close(torch.special.ndtr(first[..., 1]), u, atol=1e-12, rtol=0)
    assert Rows(torch.zeros(1, 1, 1, dtype=torch.float64)).normal(1).isfinite().all()
    with pytest.raises(NotImplementedError, match="statistically"):
        EnumeratingRng([]).rows(1, 1, 1).normal(1)
