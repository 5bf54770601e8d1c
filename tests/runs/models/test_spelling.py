"""The model of spelling against enumeration: normalisers, gradients, draws, and the maximum of entropy."""

import itertools
import math

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.core.sequences import Continuations
from freenergy.models.spelling import SpellingModel, count_cells
from freenergy.testing import law
from freenergy.training.maximum_entropy import _log_normaliser, fit_by_gradient, fit_by_scaling

WORDS = ["ab", "abc", "cab", "bac", "a", "abab", "cabc", "ca", "ab", "bb"]
EVERY = ["".join(word) for length in range(1, 5) for word in itertools.product("abc", repeat=length)]


def model(order=3, normaliser="global", seed=1):
    found = SpellingModel.of_words(WORDS, order=order, letters="abc", normaliser=normaliser)
    with torch.no_grad():
        found.weights.copy_(Rng(seed).normal(len(found.weights)))
    return found


def plain_score(found, word):
    """U(x) from the tables, n-gram by n-gram in plain Python."""
    symbols = [0] * (found.order - 1) + [*("abc".index(letter) + 1 for letter in word), 0]
    total = 0.0
    for end in range(found.order - 1, len(symbols)):
        for k, table in enumerate(found.tables(), 1):
            total += table[tuple(symbols[end - k + 1 : end + 1])].item()
    return total


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_scores_and_normalisers_are_sums_over_all_words(order):
    found = model(order)
    wanted = torch.tensor([plain_score(found, word) for word in EVERY], dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(found.log_score(found.encode(EVERY))[0], wanted, rtol=0, atol=1e-12)
        lengths = torch.tensor([len(word) for word in EVERY])
        sums = torch.stack([wanted[lengths == length].logsumexp(0) for length in range(1, 5)])
        torch.testing.assert_close(found.log_partitions(), sums, rtol=0, atol=1e-12)
        assert found.log_partition().item() == pytest.approx(wanted.logsumexp(0).item(), abs=1e-12)


@pytest.mark.parametrize("normaliser", ["global", "length"])
def test_probabilities_sum_to_one_and_draws_follow_them(normaliser):
    found = model(2, normaliser)
    with torch.no_grad():
        p = found.log_prob(found.encode(EVERY))[0].exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    drawn = law(lambda rng: found.sample(1, rng), lambda x: found.decode(x)[0])
    assert [drawn[word] for word in EVERY] == pytest.approx(p.tolist(), abs=1e-12)


@pytest.mark.parametrize("normaliser", ["global", "length"])
def test_moments_are_gradients_and_sums(normaliser):
    found = model(3, normaliser)
    x = found.encode(EVERY)
    with torch.no_grad():
        p = found.log_prob(x)[0].exp()
    counts = torch.stack([found.counts(x.candidates(slice(i, i + 1))) for i in range(len(EVERY))])
    torch.testing.assert_close(found.expected_counts(), p @ counts, rtol=0, atol=1e-12)
    step, lengths = 1e-5, None if normaliser == "global" else found.log_lengths.exp()
    with torch.no_grad():
        for k in (0, 7, len(found.weights) - 1):
            values = []
            for move in (step, -step):
                found.weights[k] += move
                values.append(_log_normaliser(found, lengths).item())
                found.weights[k] -= move
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(found_k(p, counts, k), abs=1e-8)


def found_k(p, counts, k):
    return (p @ counts)[k].item()


def test_what_is_not_a_word_has_no_probability():
    found = model(2)
    strange = [[0], [1, 2], [1, 2, 3, 1, 2, 0], [1, 0, 2, 0], [1, 2, 0]]
    with torch.no_grad():
        scores = found.log_score(Continuations.from_lists([[]], [strange]))[0]
    assert [math.isfinite(score) for score in scores.tolist()] == [False, False, False, False, True]


def test_features_are_those_seen_often_enough():
    seen = SpellingModel.of_words(WORDS, order=2, letters="abc", min_count=3)
    x = seen.encode(WORDS)
    pairs = count_cells(x, 2, 4)
    wanted = int((count_cells(x, 1, 4) >= 3).sum() + (pairs >= 3).sum())
    assert len(seen.weights) == wanted
    assert pairs[0, 1].item() == sum(word[0] == "a" for word in WORDS)
    assert seen.counts(x).min() >= 3


@pytest.mark.parametrize("normaliser", ["global", "length"])
def test_the_fit_matches_the_moments_and_has_the_most_entropy(normaliser):
    """Thm B.1 and B.2: other laws with the same moments (here: at the same lengths too) have less entropy."""
    found = SpellingModel.of_words(WORDS, order=1, letters="abc", normaliser=normaliser)
    x = found.encode(WORDS)
    fit = fit_by_gradient(found, x, max_steps=300, tolerance=1e-10)
    assert fit.moment_gap < 1e-8
    assert fit.history == sorted(fit.history)
    every = found.encode(EVERY)
    counts = torch.stack([found.counts(every.candidates(slice(i, i + 1))) for i in range(len(EVERY))])
    with torch.no_grad():
        p = fitted_law(found, every, x)
    lengths = torch.nn.functional.one_hot(every.lengths[0] - 2, 4).double()
    fixed = torch.cat([counts, lengths], dim=1)  # keeping these keeps the sum too
    for seed in range(5):
        direction = Rng(seed).normal(len(p))
        direction -= fixed @ torch.linalg.lstsq(fixed, direction.unsqueeze(1)).solution.squeeze(1)
        for scale in (-0.5, 0.5):
            other = p + scale * direction * (p / direction.abs()).min()
            torch.testing.assert_close(other @ fixed, p @ fixed, rtol=0, atol=1e-10)
            assert entropy(other) < entropy(p) - 1e-9


def fitted_law(found, every, data):
    """p with the lengths of the data where the normaliser is per length: the law that the fit is about."""
    if found.normaliser == "global":
        return found.log_prob(every)[0].exp()
    share = torch.bincount(data.lengths[0] - 2, minlength=4).double() / data.shape[1]
    log_z = found.log_partitions()
    return (found.log_score(every)[0] - log_z[every.lengths[0] - 2]).exp() * share[every.lengths[0] - 2]


def entropy(p):
    return -torch.special.xlogy(p, p).sum().item()


def test_scaling_climbs_at_every_step_to_the_same_maximum():
    words = [*WORDS, "c", "b", "aa", "cc", "acb", "bca"]
    found, other = (SpellingModel.of_words(words, order=1, letters="abc") for _ in range(2))
    x = found.encode(words)
    fit = fit_by_scaling(found, x, steps=150)
    assert all(later >= earlier - 1e-13 for earlier, later in itertools.pairwise(fit.history))
    best = fit_by_gradient(other, x, tolerance=1e-11)
    assert fit.log_likelihood == pytest.approx(best.log_likelihood, abs=1e-5)
    assert fit.moment_gap < 1e-2 < 0.5 < (found.counts(x) / len(words)).max()


def test_bad_input_is_refused_in_a_sentence():
    found = model(2)
    for words, sentence in (
        (["abcab"], "has 5 letters: the model is of 1 to 4"),
        ([""], "has 0 letters"),
        (["abd"], "has the letter 'd', not one of 'abc': leave it out"),
        ([], "there are no words"),
    ):
        with pytest.raises(UserError, match=sentence):
            found.encode(words)
    with pytest.raises(UserError, match="order is 0"):
        SpellingModel.of_words(WORDS, order=0)
    with pytest.raises(UserError, match=r"has 1\.4e\+07 n-grams: lower the order"):
        SpellingModel.of_words(WORDS, order=5)
    with pytest.raises(UserError, match="0 words were asked for"):
        found.sample(0, Rng(0))
