"""How fast importance resampling comes to its target, on a real model whose space can be summed over.

    P_n(x) = n · q(x) · w(x) · E[1/(w(x) + W_{n−1})],      E[1/(w + W_{n−1})] = ∫_0^∞ e^{−t w} φ(t)^{n−1} dt,
    φ(t) = E_q[e^{−t w}];      TV(P, P_n) falls as 1/n, below the bound E_P[(w/Z − 1)⁺ / (n − 1 + w/Z)]

stories260K has 512 tokens, so there are 262,144 continuations of two tokens: one sum each for q, Z, P and every P_n.
"""

import itertools
import math

import pytest
import torch
from scipy.stats import binomtest

from freenergy import Continuations, Rng, Sequences, SequenceSpace
from freenergy.core.roles import Target
from freenergy.models.residual import Residual
from freenergy.samplers import Resampling

V = 512
SPACE = SequenceSpace(vocab_size=V, length=2)
NUMBERS = [2**k for k in range(13)]
STEP = 0.25  # of the trapezoids in log t: their error is about e^(−π²/STEP)


def exact_laws(q, w, numbers):
    """P_n of every string for each n: the integral with t = e^s, by trapezoids over all s that matter."""
    laws = {n: torch.zeros_like(q) for n in numbers}
    for t in torch.arange(-45.0, math.log(40 / w.min().item()) + 1, STEP, dtype=torch.float64).exp().tolist():
        survives = (-t * w).exp()
        log_phi = (q * survives).sum().log().item()
        for n in numbers:
            laws[n].add_(survives, alpha=STEP * t * math.exp((n - 1) * log_phi))
    return {n: n * q * w * law for n, law in laws.items()}


def bound(q, w, n):
    """What TV(P, P_n) cannot exceed."""
    ratio = w / (q * w).sum()
    return (q * ratio * (ratio - 1).clamp(min=0) / (n - 1 + ratio)).sum().item()


def tv(p, q):
    return (p - q).abs().sum().item() / 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_integral_is_the_sum_over_all_draws(n):
    q, w = Rng(1).normal(6).softmax(0), (2 * Rng(2).normal(6)).exp()
    wanted = torch.zeros(6, dtype=torch.float64)
    for draws in itertools.product(range(6), repeat=n):
        chosen = torch.tensor(draws)
        wanted.index_add_(0, chosen, q[chosen].prod() * w[chosen] / w[chosen].sum())
    torch.testing.assert_close(exact_laws(q, w, [n])[n], wanted, atol=1e-12, rtol=0)


class Pairs:
    """A log-normal weight for each pair of tokens: E = 1.5 · (a + b)/√2 of two normal tables."""

    def __init__(self):
        a, b = Rng(3).normal(2, V).unbind(0)
        self.table = 1.5 / math.sqrt(2) * (a.unsqueeze(1) + b)

    def __call__(self, x: Continuations) -> torch.Tensor:
        return self.table[x.tokens[..., 0], x.tokens[..., 1]]


@pytest.fixture(scope="module")
def stories(story_model):
    """The model after "Once upon a time, there was a"; q and w of every continuation."""
    lm, pieces = story_model
    words = (" Once", " upon", " a", " time", ",", " there", " was", " a")
    context = [1, *(pieces.index(word) for word in words)]
    first = lm.next_log_probs(Sequences.from_lists([context]))[0].double()
    second = lm.next_log_probs(Sequences.from_lists([[*context, v] for v in range(V)])).double()
    q = (first.unsqueeze(1) + second).flatten().softmax(0)  # sums to one up to float32
    return lm, Sequences.from_lists([context]), q, (-Pairs().table.flatten()).exp()


def test_the_distance_falls_as_one_over_n(stories):
    """The slope of log TV over log n is within 0.02 of −1 from 1,024 on; at few candidates it is not yet."""
    _, _, q, w = stories
    p, laws = q * w / (q * w).sum(), exact_laws(q, w, NUMBERS)
    far = {n: tv(p, law) for n, law in laws.items()}
    torch.testing.assert_close(laws[1], q, atol=1e-14, rtol=0)
    for n, law in laws.items():
        assert law.sum().item() == pytest.approx(1, abs=1e-9)
        assert far[n] <= bound(q, w, n) + 1e-12
        assert far[n] > bound(q, w, 4 * n)  # within a factor of four of the bound
    slopes = {n: math.log2(far[n] / far[n // 2]) for n in NUMBERS[1:]}
    assert all(abs(slopes[n] + 1) < 0.02 for n in (1024, 2048, 4096))
    assert slopes[4] > -0.6
    assert far[4096] < 1e-3 < 0.5 < far[1]


@pytest.mark.statistical
def test_the_sampler_follows_its_law(stories):
    """300 texts of 8 candidates each fall into A_m = {P_8 > P_m}, m = 1 and 2, binomially with P_8(A_m).

    Two exact tests at 5e-7: a false failure comes once in a million. Both mutants fail by far: the first candidate
    (no resampling), and a choice among two (a wrong n).
    """
    lm, context, q, w = stories
    laws, sampler = exact_laws(q, w, [1, 2, 8]), Resampling(candidates=8)
    found = [sampler(Target(Residual(lm, Pairs()), context, SPACE), 1, Rng(7).child("text", i)) for i in range(300)]
    pairs = [
        Resampling(candidates=2).choose(sampled.candidates.take(torch.arange(2)), 1, Rng(8).child(i))
        for i, sampled in enumerate(found)
    ]
    written = {
        8: [sampled.x.tokens[0, 0] for sampled in found],
        1: [sampled.candidates.x.tokens[0, 0] for sampled in found],
        2: [sampled.x.tokens[0, 0] for sampled in pairs],
    }

    def follows(texts):
        strings = torch.stack(texts) @ torch.tensor([V, 1])
        chances = []
        for m in (1, 2):
            A = laws[8] > laws[m]
            count = int(A[strings].sum())
            chances.append(binomtest(count, len(strings), laws[8][A].sum().item()).pvalue)
        return min(chances) >= 5e-7

    assert follows(written[8])
    assert not follows(written[1])
    assert not follows(written[2])
