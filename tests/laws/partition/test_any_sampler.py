"""The certificate of a black box, by enumeration: what a sampler needs, and what breaks it.

    resampling emits y_i of y_1 … y_n with probability ∝ w(y_i) = e^{−E(y_i)}; for draws of an exchangeable law Q

    P_n(x) = n · q(x) · E[w(x) / Σ_j w(y_j) | y_1 = x],      q the law of each y_j alone
    log P_n(x) ≥ log q(x) + E[gain(x; y_2 … y_n) | y_1 = x],      gain as in ``partition.certificate``          (Jensen)

No probability of q is used, and q need not be a language model. Where the draws are independent the condition y_1 = x
changes nothing, so any n − 1 draws certify x. Where they depend on each other, draws made without x prove nothing: a
sampler that repeats its first text n times gains nothing, and would be certified to.
"""

import itertools
import math

import pytest
import torch

from freenergy import Rng
from freenergy.partition import certified_gain

M = 5  # texts: the law of a sampler is any vector of five probabilities


def laws():
    """Samplers that are not language models: any law, one that never writes some texts, one that writes one text."""
    yield "any", Rng(1).uniform(M).softmax(0)
    yield "never writes 0 and 3", torch.tensor([0.0, 0.2, 0.5, 0.0, 0.3], dtype=torch.float64)
    yield "writes 2 alone", torch.eye(M, dtype=torch.float64)[2]


def independent(q, n):
    """Q of n independent draws."""
    return {draws: math.prod(q[i].item() for i in draws) for draws in itertools.product(range(M), repeat=n)}


def different(q, n):
    """Q of n draws one after the other, without those that were drawn: exchangeable by symmetry once shuffled."""
    found = dict.fromkeys(itertools.product(range(M), repeat=n), 0.0)
    for order in itertools.permutations(range(M), n):
        chance, left = 1.0, 1.0
        for i in order:
            chance *= q[i].item() / left
            left -= q[i].item()
        for draws in itertools.permutations(order):
            found[draws] += chance / math.factorial(n)
    return found


def emitted(Q, energy):
    """The exact law of what resampling emits."""
    law = torch.zeros(M, dtype=torch.float64)
    for draws, chance in Q.items():
        at = torch.tensor(draws)
        law.index_add_(0, at, chance * (-energy[at]).softmax(0))
    return law


def margin(Q):
    q = torch.zeros(M, dtype=torch.float64)
    for draws, chance in Q.items():
        q[draws[0]] += chance
    return q


def certified(Q, energy, x, *, given_x):
    """E gain(x; y_2 … y_n), over draws that know of x or that do not."""
    total, gain = 0.0, 0.0
    for draws, chance in Q.items():
        if draws[0] == x or not given_x:
            total += chance
            gain += chance * certified_gain(energy[[x]], energy[list(draws[1:])].unsqueeze(0)).item()
    return gain / total


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("name", "q"), list(laws()), ids=[name for name, _ in laws()])
def test_independent_draws_of_any_law_certify(name, q, n):
    energy, Q = 1.5 * Rng(3).normal(M), independent(q, n)
    law = emitted(Q, energy)
    assert law.sum().item() == pytest.approx(1, abs=1e-12)
    for x in range(M):
        if q[x] == 0:  # the base never writes it, and neither does resampling: both sides are −∞
            assert law[x] == 0
            continue
        sure = q[x].log().item() + certified(Q, energy, x, given_x=False)
        assert sure <= law[x].log().item() + 1e-12
        assert sure == pytest.approx(q[x].log().item() + certified(Q, energy, x, given_x=True), abs=1e-12)
    flipped = [q[x].log() + certified(Q, -energy, x, given_x=False) > law[x].log() + 1e-3 for x in range(M) if q[x] > 0]
    assert any(flipped) == (name != "writes 2 alone")  # the mutant with the wrong sign is caught


def repeated(q, n):
    """Q of a sampler that writes one text and repeats it: exchangeable, with the law q of each draw alone."""
    return {draws: q[draws[0]].item() * (len(set(draws)) == 1) for draws in itertools.product(range(M), repeat=n)}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("sampler", [different, repeated])
def test_exchangeable_draws_certify_given_the_text_and_not_without_it(sampler, n):
    """With x as one of the draws the bound holds; n − 1 draws of a repeating sampler, made without x, break it."""
    q, energy = Rng(1).uniform(M).softmax(0), 1.5 * Rng(3).normal(M)
    Q = sampler(q, n)
    law, own = emitted(Q, energy), margin(Q)
    assert sum(Q.values()) == pytest.approx(1, abs=1e-12)
    slack = {
        given_x: [law[x].log() - own[x].log() - certified(Q, energy, x, given_x=given_x) for x in range(M)]
        for given_x in (True, False)
    }
    assert min(slack[True]) >= -1e-12
    if sampler is repeated:
        torch.testing.assert_close(law, own)  # there is nothing to choose from
        assert min(slack[False]) < -0.1
