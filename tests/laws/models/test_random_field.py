"""Random fields on worlds that can be summed: they sum to one, with one constant or one for each length."""

from itertools import product

import numpy as np
import pytest

from freenergy import Continuations, NgramLM, UserError
from freenergy.core.sentences import Sentences
from freenergy.models.length_law import LengthLaw
from freenergy.models.normalisers import Linear, PerLength, Single
from freenergy.models.random_field import RandomField

V, EOS, M = 4, 0, 4
EVERY = Sentences.from_lists([[*x, EOS] for n in range(1, M + 1) for x in product(range(1, V), repeat=n)])


def potential(text):
    """A number for every string, without structure."""
    return np.array([np.sin(sum((i + 2) * t for i, t in enumerate(row))) for row in text.lists()])


def field(base=None, **more):
    return RandomField(potential, base, EOS, V, M, **more)


@pytest.fixture
def lm():
    return NgramLM.fit(np.array([1, 2, 0, 3, 1, 2, 0, 2, 0, 1, 1, 3, 0]), vocab_size=V, eos=EOS, order=2)


def exact(of):
    """The normalisers by summing over all 120 sentences."""
    scores, lengths = of.log_scores(EVERY), EVERY.lengths
    z = [np.logaddexp.reduce(scores[lengths == n]) for n in range(1, M + 1)]
    return Single(value=float(np.logaddexp.reduce(z)), is_exact=True), PerLength(values=np.array(z), is_exact=True)


@pytest.mark.parametrize("with_base", [False, True])
def test_both_forms_sum_to_one(lm, with_base):
    of = field(lm if with_base else None)
    one, each = exact(of)
    law = LengthLaw(np.array([0.1, 0.4, 0.3, 0.2]))
    globally, by_length = of.with_normaliser(one), of.with_normaliser(each, law)
    assert np.exp(globally.log_prob(EVERY)).sum() == pytest.approx(1, abs=1e-12)
    p = np.exp(by_length.log_prob(EVERY))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert [p[EVERY.lengths == n].sum() for n in range(1, M + 1)] == pytest.approx(law.probs, abs=1e-12)
    # Eq. 3.8: a globally normalised field is a mixture over lengths with the weights Z_l / Z
    implied = LengthLaw(np.exp(each.values - one.value))
    same = of.with_normaliser(each, implied)
    assert same.log_prob(EVERY) == pytest.approx(globally.log_prob(EVERY), abs=1e-12)


def test_log_score_of_continuations_knows_what_a_sentence_is(lm):
    of = field(lm)
    x = Continuations.from_lists([[]], [[[1, 2, 0], [1, 2], [0], [1, 1, 1, 1, 1, 0]]])
    found = of.log_score(x)[0].tolist()
    assert found[0] == pytest.approx(of.log_scores(Sentences.from_lists([[1, 2, 0]]))[0], abs=1e-12)
    assert found[1:] == [-np.inf] * 3
    with pytest.raises(UserError, match="empty context"):
        of.log_score(Continuations.from_lists([[1]], [[[0]]]))


def test_a_uniform_potential_prefers_long_sentences():
    """With U = 0 and three words the implied length law is .025, .075, .225, .675."""
    flat = RandomField(lambda text: np.zeros(text.num), None, EOS, V, M)
    one, each = exact(flat)
    assert np.exp(each.values - one.value) == pytest.approx([0.025, 0.075, 0.225, 0.675], abs=1e-12)


def test_log_prob_is_a_promise(lm):
    of = field(lm)
    with pytest.raises(UserError, match="has none"):
        of.log_prob(EVERY)
    guess = of.with_normaliser(Single(value=0.0))
    with pytest.raises(UserError, match="an estimate"):
        guess.log_prob(EVERY)
    assert guess.log_prob_estimate(EVERY) == pytest.approx(of.log_scores(EVERY))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda lm: field(lm).log_scores(Sentences.from_lists([[1, 1, 1, 1, 1, 0]])), "has 5 words"),
        (lambda lm: field(lm).log_scores(Sentences.from_lists([[0]])), "has 0 words"),
        (lambda lm: field().log_scores(Sentences.from_lists([[4, 0]])), "not in the vocabulary of 4"),
        (lambda lm: RandomField(potential, lm, EOS, 9, M), "another vocabulary"),
        (lambda lm: field(normaliser=PerLength(values=np.zeros(4))), "needs a length law"),
        (lambda lm: field(lengths=LengthLaw(np.ones(1))), "ends at 1"),
        (lambda lm: LengthLaw(np.array([0.5, 0.4])), "sum to one"),
        (lambda lm: LengthLaw.fit(np.array([0, 2]), longest=4), "lengths must be"),
    ],
)
def test_what_is_wrong_is_said(lm, make, words):
    with pytest.raises(UserError, match=words):
        make(lm)


@pytest.mark.parametrize("num", [10, 1000, 20_000])
def test_length_laws_sum_to_one(num):
    lengths = np.random.default_rng(num).poisson(8, size=num).clip(1, 30)
    law = LengthLaw.fit(lengths, longest=40)
    assert law.probs.sum() == pytest.approx(1, abs=1e-12)
    assert (law.probs > 0).all()
    assert LengthLaw.fit(lengths, longest=40, smooth=0.0, floor=0.0).probs == pytest.approx(
        np.bincount(lengths, minlength=41)[1:] / num, abs=1e-12
    )


def test_a_line_takes_the_place_of_lengths_without_draws():
    z = PerLength(values=np.array([1.0, 1.5, 2.0, 9.0]), ess=np.array([50.0, 40.0, 60.0, 2.0]))
    assert z.filled().values == pytest.approx([1.0, 1.5, 2.0, 2.5], abs=1e-9)
    line = Linear.fit(PerLength(values=np.array([1.0, 1.5, 2.0])))
    assert (line.a, line.b) == pytest.approx((0.5, 0.5))
    with pytest.raises(UserError, match="effective draws"):
        PerLength(values=np.zeros(2), ess=np.ones(2)).filled()
