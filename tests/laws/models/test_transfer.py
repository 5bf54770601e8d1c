"""The exact field of pairs against sums over all sentences, finite differences, and the bigram model in it."""

from itertools import product

import numpy as np
import pytest

from freenergy import NgramLM, Rng, UserError
from freenergy.core.sentences import Sentences
from freenergy.models.length_law import LengthLaw
from freenergy.models.random_field import RandomField
from freenergy.models.transfer import PairField, PairWeights
from freenergy.training.pair_fit import fit_pairs

V, EOS, M = 4, 0, 4
EVERY = Sentences.from_lists([[*x, EOS] for n in range(1, M + 1) for x in product(range(1, V), repeat=n)])


@pytest.fixture
def field():
    generator = np.random.default_rng(1)
    pairs = np.array([[0, 1], [1, 2], [2, 2], [3, 0], [2, 1], [0, 3]])
    weights = PairWeights(generator.normal(size=V), generator.normal(size=6), generator.normal(size=(2, V)))
    return PairField(pairs, np.array([1, 0, 0, 1]), weights, eos=EOS, longest=M)


def by_hand(field, row):
    """U of one sentence, in a loop."""
    total, before = 0.0, EOS
    for token in row:
        total += field.weights.words[token] + field.weights.classes[field.classes[before], token]
        for k, (i, j) in enumerate(field.pairs):
            total += field.weights.pairs[k] * ((i, j) == (before, token))
        before = token
    return total


def test_potentials_and_normalisers_are_the_sums(field):
    U = np.array([by_hand(field, row) for row in EVERY.lists()])
    assert field.potential(EVERY) == pytest.approx(U, abs=1e-12)
    z = [np.logaddexp.reduce(U[EVERY.lengths == n]) for n in range(1, M + 1)]
    assert field.log_z() == pytest.approx(z, abs=1e-12)
    law = LengthLaw(np.array([0.1, 0.2, 0.3, 0.4]))
    whole = RandomField(field.potential, None, EOS, V, M, normaliser=field.normaliser(), lengths=law)
    assert np.exp(whole.log_prob(EVERY)).sum() == pytest.approx(1, abs=1e-12)


def test_the_gradient_is_the_expected_features_and_the_finite_difference(field):
    num = np.array([3.0, 0.0, 2.0, 1.5])
    value, gradient = field.expected(num)
    assert value == pytest.approx(num @ field.log_z(), abs=1e-12)
    p = np.exp(field.potential(EVERY) - field.log_z()[EVERY.lengths - 1])
    one = [field.counts(EVERY.take(i, i + 1)).flat() for i in range(EVERY.num)]
    assert gradient.flat() == pytest.approx((p * num[EVERY.lengths - 1]) @ np.array(one), abs=1e-11)
    at, step = field.weights.flat(), 1e-6
    for k in (1, V + 2, V + 6 + 3):
        moved = [at.copy(), at.copy()]
        moved[0][k] += step
        moved[1][k] -= step
        up, down = (num @ field.with_weights(field.unflat(each)).log_z() for each in moved)
        assert gradient.flat()[k] == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_a_bigram_model_is_a_member():
    stream = np.append(np.random.default_rng(0).integers(0, 6, size=500), 0)
    lm = NgramLM.fit(stream, vocab_size=6, eos=0, order=2)
    field = PairField.from_ngram(lm, longest=5)
    text = Sentences.from_lists([[1, 2, 0], [5, 5, 3, 1, 0], [4, 0]])
    assert field.potential(text) == pytest.approx(lm.log_prob(text.continuations())[0].numpy(), abs=1e-12)
    every = Sentences.from_lists([[*x, 0] for n in (1, 2) for x in product(range(1, 6), repeat=n)])
    p = np.exp(lm.log_prob(every.continuations())[0].numpy())
    assert np.exp(field.log_z()[:2]) == pytest.approx([p[every.lengths == n].sum() for n in (1, 2)], abs=1e-13)


def test_exact_draws_have_the_law(field):
    """2,000 draws of two words: chi-square over nine strings, false failure 1e-6."""
    from scipy.stats import chisquare

    drawn = field.sample(np.full(2_000, 2), Rng(5))
    two = EVERY.rows(EVERY.lengths == 2)
    p = np.exp(field.potential(two) - field.log_z()[1])
    index = {tuple(row): i for i, row in enumerate(two.lists())}
    seen = np.bincount([index[tuple(row)] for row in drawn.lists()], minlength=two.num)
    assert chisquare(seen, p * 2_000).pvalue > 1e-6
    assert chisquare(seen, np.roll(p, 1) * 2_000).pvalue < 1e-6  # the mutant: shifted by one


def test_the_exact_fit_matches_the_moments_and_rises():
    generator = np.random.default_rng(3)
    text = Sentences.from_lists([[*generator.integers(1, V, size=n).tolist(), 0] for n in generator.integers(1, 5, 80)])
    lm = NgramLM.fit(text.tokens, vocab_size=V, eos=EOS, order=2)
    start = PairField.from_ngram(lm, longest=M, classes=np.array([1, 0, 0, 1]))
    found = fit_pairs(start, text, l2=1e-6, iterations=200)
    num = np.bincount(text.lengths, minlength=M + 1)[1:].astype(float)
    _, expected = found.field.expected(num)
    assert expected.pairs == pytest.approx(start.counts(text).pairs, abs=0.05)
    before = (start.potential(text) - start.log_z()[text.lengths - 1]).mean()
    assert found.log_likelihood > before


def test_wrong_fields_are_refused(field):
    with pytest.raises(UserError, match="order 3"):
        PairField.from_ngram(NgramLM.fit(np.array([1, 0]), vocab_size=2, eos=0, order=3), longest=2)
    with pytest.raises(UserError, match="one word or more"):
        PairField(field.pairs, field.classes, field.weights, eos=0, longest=0)
    with pytest.raises(UserError, match="l2 is -1"):
        fit_pairs(field, EVERY, l2=-1.0)
