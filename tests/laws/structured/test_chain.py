"""Every method of a chain against the list of all its taggings; exact numbers of the literature."""

import itertools
import math

import pytest
import torch

from chain_cases import MASKS, B, K, T, case, check_every_method, close, numbers
from freenergy import Rng, UserError
from freenergy.structured import NO_LABEL, Allowed, LinearChain, StructuredDistribution, bio, bioes
from freenergy.testing import law

CASES = [(m, s, a) for m in MASKS for s in ("shared", "positions", "rows") for a in ("free", "pairs", "all")]


@pytest.mark.parametrize(("mask", "steps", "allowed"), CASES)
def test_every_method_by_enumeration(mask, steps, allowed):
    check_every_method(*case(mask, steps, allowed), mask == "full")


@pytest.mark.parametrize(("mask", "steps", "allowed"), [("single", "shared", "all"), ("single", "rows", "pairs")])
def test_the_law_of_draws_is_exact(mask, steps, allowed):
    """Of the first row; the others have one position at most, so that few branches are left."""
    chain, lists = case(mask, steps, allowed)
    found = law(lambda rng: chain.sample(1, rng), lambda y: tuple(y[0, 0].tolist()))
    for one in lists[:1]:
        for labels, p in zip(one.labels.tolist(), one.probs().tolist(), strict=True):
            assert found.get(tuple(labels), 0.0) == pytest.approx(p, abs=1e-12)


def test_draws_do_not_depend_on_batch_and_padding():
    chain, _ = case("lengths")
    short = LinearChain(
        chain._given.emissions[1:2, :2], chain._given.transitions, start=chain._given.start, end=chain._given.end
    )
    both = chain.sample(5, Rng(7))[1:2, :, :2]
    assert torch.equal(short.sample(5, Rng(7).shift(contexts=1)), both)


@pytest.mark.parametrize("mask", MASKS)
def test_expectation_cross_entropy_and_kl(mask):
    p, lists = case(mask, "rows", "pairs")
    q, others = case(mask, "rows", "pairs", seed=9)
    f, g = numbers(B, T, K, seed=20), numbers(K, K, seed=21)
    found = p.expectation(f, g)
    for b, one in enumerate(lists):

        def value(y, b=b):
            kept = [t for t, k in enumerate(y) if k >= 0]
            pairs = itertools.pairwise(kept)
            return sum(float(f[b, t, y[t]]) for t in kept) + sum(float(g[y[s], y[t]]) for s, t in pairs)

        assert float(found[b]) == pytest.approx(one.expectation(value), abs=1e-12)
        cross = -float((one.probs() * others[b].probs().log()).nan_to_num().sum())
        assert float(p.cross_entropy(q)[b]) == pytest.approx(cross, abs=1e-12)
        assert float(p.kl(q)[b]) == pytest.approx(cross - one.entropy(), abs=1e-12)
    close(p.kl(p), torch.zeros(B, dtype=torch.float64))


def test_what_the_other_forbids_is_infinitely_far():
    free, _ = case()
    tied, _ = case(allowed="pairs")
    assert (free.kl(tied) == math.inf).all()
    assert (tied.kl(free) < math.inf).all()


@pytest.mark.parametrize("mask", MASKS)
def test_partial_labels_sum_over_the_compatible_taggings(mask):
    chain, lists = case(mask, "shared", "pairs")
    sets = torch.rand(B, T, K, generator=torch.Generator().manual_seed(3)) < 0.8
    sets[..., 1] = True
    found = chain.partial_log_prob(sets).exp()
    for b, one in enumerate(lists):
        wanted = one.expectation(lambda y, b=b: float(all(k < 0 or bool(sets[b, t, k]) for t, k in enumerate(y))))
        assert float(found[b]) == pytest.approx(wanted, abs=1e-12)


def test_the_literature_s_chain():
    phi = torch.tensor([[[0.5, -0.2], [0.1, 0.4], [-0.3, 0.6]]], dtype=torch.float64)
    A = torch.tensor([[0.7, -0.5], [0.2, 0.3]], dtype=torch.float64)
    chain = LinearChain(phi, A, start=torch.tensor([0.0, 0.1], dtype=torch.float64))
    assert float(chain.log_partition()) == pytest.approx(3.1718131805531, abs=1e-12)
    assert chain.argmax().labels.tolist() == [[0, 0, 0]]
    assert float(chain.argmax().log_score) == pytest.approx(1.7, abs=1e-12)
    close(chain.marginals()[0, :, 0], torch.tensor([0.609974, 0.532527, 0.431629], dtype=torch.float64), 5e-7)
    close(
        chain.pair_marginals()[0, 0],
        torch.tensor([[0.399533, 0.210441], [0.132993, 0.257033]], dtype=torch.float64),
        5e-7,
    )
    assert chain.posterior_argmax().tolist() == [[0, 0, 1]]
    assert isinstance(chain, StructuredDistribution)


def test_schemes():
    names = ["O", "B-A", "I-A", "B-B", "I-B"]
    rules, allowed = bio(names), set()
    for j, before in enumerate(names):
        allowed |= {(before, after) for k, after in enumerate(names) if rules.pairs[j, k]}
    assert {pair for pair in allowed if pair[1][0] == "I"} == {
        ("B-A", "I-A"), ("I-A", "I-A"), ("B-B", "I-B"), ("I-B", "I-B")
    }  # fmt: skip
    assert all((before, after) in allowed for before in names for after in ("O", "B-A", "B-B"))
    assert rules.start.tolist() == [True, True, False, True, False]
    names = ["O", "B-A", "I-A", "E-A", "S-A"]
    rules = bioes(names)
    follows = {before: {after for k, after in enumerate(names) if rules.pairs[j, k]} for j, before in enumerate(names)}
    outside = {"O", "B-A", "S-A"}
    assert follows == {"O": outside, "E-A": outside, "S-A": outside, "B-A": {"I-A", "E-A"}, "I-A": {"I-A", "E-A"}}
    assert (rules.start.tolist(), rules.end.tolist()) == (
        [True, True, False, False, True],
        [True, False, False, True, True],
    )
    with pytest.raises(UserError, match="'X-A' is not of the scheme BIO"):
        bio(["O", "X-A"])


def test_bad_input():
    x, A = numbers(2, 3, 2), numbers(2, 2)
    closed = Allowed(start=torch.tensor([False, False]))
    for wrong, match in (
        (
            lambda: LinearChain(x, A).log_prob(torch.tensor([[0, 1, 2], [0, 0, 0]])),
            "label 2 of sequence 0 is not",
        ),
        (lambda: LinearChain(x[:, :0], A), r"emissions have the shape \[2, 0, 2\]"),
        (lambda: LinearChain(x, A, lengths=torch.tensor([4, 1])), "lengths run from 1 to 4"),
        (lambda: LinearChain(x, A, lengths=torch.tensor([1])), "give 2 whole numbers"),
        (lambda: LinearChain(x, A, mask=torch.ones(2, 2)), "one entry per position"),
        (lambda: LinearChain(x, A, mask=torch.ones(2, 3), lengths=torch.tensor([3, 3])), "give one of them"),
        (lambda: LinearChain(x, A[:1]), "transitions has the shape"),
        (lambda: LinearChain(x, A, allowed=closed).log_prob(torch.zeros(2, 3).long()), "no tagging of sequence 0 is"),
        (lambda: LinearChain(x, A, allowed=closed).sample(1, Rng(0)), "no tagging of sequence 0 is allowed"),
        (lambda: LinearChain(x * math.nan, A).log_partition(), "emissions contain NaN"),
        (lambda: LinearChain(x * math.nan, A).argmax(), "emissions contain NaN"),
        (lambda: LinearChain(x, A / 0).log_partition(), "transitions contain NaN or"),
        (lambda: LinearChain(x, A).top_k(0), "k is 0"),
    ):
        with pytest.raises(UserError, match=match):
            wrong()
    assert (LinearChain(x, A, allowed=closed).log_partition() == -math.inf).all()
    nothing = LinearChain(x, A, allowed=closed).argmax()
    assert (nothing.log_score == -math.inf).all()
    assert (nothing.labels == NO_LABEL).all()
