"""Chains of higher order and semi-Markov chains against the lists of all their labellings."""

import itertools
import math
from functools import partial

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.structured import (
    INSIDE,
    NO_LABEL,
    Allowed,
    HigherOrderChain,
    LinearChain,
    SegmentChain,
    StructuredDistribution,
    spans,
)
from freenergy.testing import Enumerated, enumerate_higher_order, enumerate_segments, law

B, T, K, D = 3, 4, 2, 3
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]]).bool()
LENGTHS = [4, 3, 1]
RULES = Allowed(pairs=torch.tensor([[True, True], [True, False]]), end=torch.tensor([True, False]))


def numbers(*shape, seed=0):
    return Rng(seed).child("numbers", *shape).normal(*shape)


def higher(order, rules=None, seed=0):
    x, A, end = numbers(B, T, K, seed=seed), numbers(*[K + 1] * order, K, seed=seed + 1), numbers(K, seed=seed + 2)
    lists = [enumerate_higher_order(x[b], A, end=end, mask=MASK[b].tolist(), allowed=rules, row=b) for b in range(B)]
    return HigherOrderChain(x, A, end=end, mask=MASK, allowed=rules), lists


def segments(rules=None, seed=0):
    x, A = numbers(B, T, D, K, seed=seed), numbers(K, K, seed=seed + 1)
    more = {"start": numbers(K, seed=seed + 2), "end": numbers(K, seed=seed + 3), "allowed": rules}
    lists = [enumerate_segments(x[b], A, length=LENGTHS[b], **more) for b in range(B)]
    return SegmentChain(x, A, lengths=torch.tensor(LENGTHS), **more), lists


MAKE = {f"order {n}": partial(higher, n) for n in (1, 2, 3)} | {"segments": segments}


def covering(one):
    """p(position t is in a segment with label k) from the list."""
    found = torch.zeros(T, K, dtype=torch.float64)
    for y, p in zip(one.labels, one.probs().tolist(), strict=True):
        for first, after, label in spans(y):
            found[first:after, label] += p
    return found


@pytest.mark.parametrize("rules", [None, RULES], ids=["free", "rules"])
@pytest.mark.parametrize("name", MAKE)
def test_every_method_by_enumeration(name, rules):
    chain, lists = MAKE[name](rules=rules)
    other, others = MAKE[name](rules=rules, seed=7)
    assert isinstance(chain, StructuredDistribution)
    most = max(len(one.labels) for one in lists)
    best, top = chain.argmax(), chain.top_k(most + 1)
    for b, one in enumerate(lists):
        probs = one.probs()
        assert float(chain.log_partition()[b]) == pytest.approx(float(one.log_partition()), abs=1e-12)
        assert float(chain.entropy()[b]) == pytest.approx(one.entropy(), abs=1e-12)
        cross = -float((probs * others[b].probs().log()).nan_to_num().sum())
        assert float(chain.cross_entropy(other)[b]) == pytest.approx(cross, abs=1e-12)
        assert float(chain.kl(other)[b]) == pytest.approx(cross - one.entropy(), abs=1e-12)
        wanted = covering(one) if name == "segments" else one.marginals(K)
        torch.testing.assert_close(chain.marginals()[b], wanted, atol=1e-12, rtol=0)
        ranked = one.best(len(one.labels))
        valid = ranked.log_score > -math.inf
        found = top.log_score[b, : len(valid)]
        torch.testing.assert_close(found[valid], ranked.log_score[valid], atol=1e-12, rtol=0)
        assert torch.equal(top.labels[b, : len(valid)][valid], ranked.labels[valid])
        assert (top.log_score[b, int(valid.sum()) :] == -math.inf).all()
        assert torch.equal(best.labels[b], ranked.labels[0])
        y = best.labels.unsqueeze(1).repeat(1, len(one.labels), 1)
        y[b] = one.labels
        torch.testing.assert_close(chain.log_prob(y)[b], probs.log(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["order 2", "segments"])
def test_the_law_of_draws_is_exact(name):
    chain, lists = MAKE[name](rules=RULES)
    row = {"order 2": 1, "segments": 1}[name]
    found = law(lambda rng: chain.sample(1, rng), lambda y: tuple(y[row, 0].tolist()))
    for labels, p in zip(lists[row].labels.tolist(), lists[row].probs().tolist(), strict=True):
        assert found.get(tuple(labels), 0.0) == pytest.approx(p, abs=1e-12)


def boundaries(one):
    """p(a segment with label k begins at t after one with label j), at t − 1, from the list."""
    found = torch.zeros(T - 1, K, K, dtype=torch.float64)
    for y, p in zip(one.labels, one.probs().tolist(), strict=True):
        parts = spans(y)
        for (_, _, j), (t, _, k) in itertools.pairwise(parts):
            found[t - 1, j, k] += p
    return found


def label_of_each_position(name, y):
    """The label of every position, that of the segment around it; NO_LABEL where there is none."""
    if name != "segments":
        return y.tolist()
    found = [NO_LABEL] * T
    for first, after, label in spans(y):
        found[first:after] = [label] * (after - first)
    return found


@pytest.mark.parametrize("rules", [None, RULES], ids=["free", "rules"])
@pytest.mark.parametrize("name", MAKE)
def test_pairs_partial_labels_and_expectations_by_enumeration(name, rules):
    chain, lists = MAKE[name](rules=rules)
    sets = torch.ones(B, T, K, dtype=torch.bool)
    sets[0, 1, 0] = sets[0, 2, 1] = sets[1, 0, 1] = False
    sets[1, 3], sets[2, 3] = False, False  # position 3 of row 1 counts for chains of labels only
    if name != "segments":
        sets[1, 3, 0] = True
    f, g = numbers(T, K, seed=9), numbers(K, K, seed=10)
    g[0, 1] = -math.inf if rules is None else 0.0
    given = chain.condition(sets)
    for b, one in enumerate(lists):
        tags = [label_of_each_position(name, y) for y in one.labels]
        pairs = boundaries(one) if name == "segments" else one.pair_marginals(K)
        torch.testing.assert_close(chain.pair_marginals()[b], pairs, atol=1e-12, rtol=0)
        fits = torch.tensor([all(k < 0 or bool(sets[b, t, k]) for t, k in enumerate(y)) for y in tags])
        mass = one.probs()[fits].sum()
        torch.testing.assert_close(chain.partial_log_prob(sets)[b], mass.log(), atol=1e-12, rtol=0)
        only = Enumerated(one.labels, torch.where(fits, one.log_score, -math.inf))
        torch.testing.assert_close(
            given.entropy()[b], torch.tensor(only.entropy(), dtype=torch.float64), atol=1e-12, rtol=0
        )
        assert torch.equal(given.argmax().labels[b], only.best(1).labels[0])
        wanted = sum(
            p * sum(float(f[t, k]) for t, k in enumerate(y) if k >= 0) for y, p in zip(tags, one.probs(), strict=True)
        )
        torch.testing.assert_close(chain.expectation(f.expand(B, T, K))[b], wanted, atol=1e-12, rtol=0)
        total = float(wanted) + float(torch.where(pairs > 0, pairs * g, 0.0).sum())
        assert float(chain.expectation(f.expand(B, T, K), g)[b]) == pytest.approx(total, abs=1e-12)
        likeliest = (covering(one) if name == "segments" else one.marginals(K)).argmax(-1)
        has_label = torch.tensor([k >= 0 for k in tags[0]])
        assert torch.equal(chain.posterior_argmax()[b], torch.where(has_label, likeliest, NO_LABEL))


def test_sets_that_allow_nothing():
    for chain in (higher(2)[0], segments()[0]):
        none = torch.zeros(B, T, K, dtype=torch.bool)
        assert (chain.partial_log_prob(none) == -math.inf).all()
        with pytest.raises(UserError, match="of sequence 0 is allowed"):
            chain.condition(none).marginals()
        with pytest.raises(UserError, match="shape"):
            chain.condition(none[:, :2])
        with pytest.raises(UserError, match="expectation of nothing"):
            chain.expectation()


def test_order_one_is_the_linear_chain():
    x, A = numbers(B, T, K), numbers(K + 1, K)
    plain = LinearChain(x, A[:K], start=A[K])
    torch.testing.assert_close(HigherOrderChain(x, A).log_partition(), plain.log_partition(), atol=1e-12, rtol=0)


def test_segments_of_one_position_are_the_linear_chain():
    x, A = numbers(B, T, 1, K), numbers(K, K)
    found, wanted = SegmentChain(x, A), LinearChain(x.squeeze(2), A)
    torch.testing.assert_close(found.log_partition(), wanted.log_partition(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.marginals(), wanted.marginals(), atol=1e-12, rtol=0)


def test_gradients_by_finite_differences():
    x, A = numbers(2, 3, 2, 2).requires_grad_(), numbers(2, 2).requires_grad_()
    lengths = torch.tensor([3, 2])
    for method in ("log_partition", "entropy", "marginals"):
        assert torch.autograd.gradcheck(
            lambda x, A, m=method: getattr(SegmentChain(x, A, lengths=lengths), m)(), (x, A)
        )
    x, A = numbers(1, 3, 2).requires_grad_(), numbers(3, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, A: HigherOrderChain(x, A).log_partition(), (x, A))


def test_a_row_without_positions():
    chain = SegmentChain(numbers(2, 3, 2, 2), numbers(2, 2), lengths=torch.tensor([0, 3]))
    assert float(chain.log_partition()[0]) == 0
    assert chain.argmax().labels[0].tolist() == [NO_LABEL] * 3
    assert float(chain.log_prob(chain.sample(1, Rng(0)))[0, 0]) == 0


def test_bad_input():
    x, A = numbers(1, 3, 2, 2), numbers(2, 2)
    closed = Allowed(start=torch.tensor([False, False]))
    for wrong, match in (
        (lambda: SegmentChain(x[:, :, :0], A), "segments have the shape"),
        (lambda: SegmentChain(x, A[:1]), "transitions has the shape"),
        (lambda: SegmentChain(x * math.nan, A).argmax(), "contain NaN"),
        (lambda: SegmentChain(x, A, allowed=closed).sample(1, Rng(0)), "no segmentation of sequence 0 is allowed"),
        (lambda: SegmentChain(x, A).log_prob(torch.tensor([[INSIDE, 0, 0]])), "-2 at position 0 of sequence 0"),
        (lambda: SegmentChain(x, A).log_prob(torch.tensor([[0, 2, 0]])), "2 at position 1 of sequence 0 is not"),
        (lambda: HigherOrderChain(x[:, :, 0], A), "transitions have the shape"),
        (lambda: HigherOrderChain(torch.zeros(1, 2, 99), torch.zeros(100, 100, 99)), "more than 4096 states"),
        (lambda: HigherOrderChain(x[:, :, 0], numbers(3, 2)).log_prob(torch.tensor([[0, 0, 5]])), "not in the tag set"),
    ):
        with pytest.raises(UserError, match=match):
            wrong()
    long = SegmentChain(x, A).log_prob(torch.tensor([[0, INSIDE, INSIDE]]))
    assert float(long) == -math.inf  # longer than D
    assert (SegmentChain(x, A, allowed=closed).log_partition() == -math.inf).all()


def test_gradients_of_the_linear_chain_s_sums():
    x, A, start, end = (numbers(*shape).requires_grad_() for shape in ((2, 3, 2), (2, 2), (2,), (2,)))
    mask, rules = torch.tensor([[1, 1, 1], [1, 0, 1]]), Allowed(pairs=torch.tensor([[True, True], [False, True]]))

    def number(method):
        return lambda x, A, start, end: getattr(
            LinearChain(x, A, start=start, end=end, mask=mask, allowed=rules), method
        )()

    for method in ("log_partition", "marginals", "pair_marginals", "entropy"):
        assert torch.autograd.gradcheck(number(method), (x, A, start, end))
    assert torch.autograd.gradgradcheck(number("log_partition"), (x, A, start, end))
