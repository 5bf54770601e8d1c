"""The paired bootstrap against a plain loop, and its interval against repeated sampling."""

import math

import numpy as np
import pytest

from freenergy import Rng, UserError
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.perplexity import measured_percent, measured_rate


def text(rng, D=25, better=0.05):
    """Windows of D documents that are hard or easy for both models, and a little better read by the first."""
    documents = np.repeat(np.arange(D), rng.integers(1, 5, D))
    tokens = rng.integers(10, 40, len(documents)).astype(float)
    hard = rng.normal(3.0, 0.8, D)[documents]
    gain = rng.normal(better, 0.1, D)[documents]
    b = -tokens * hard
    return b + tokens * gain, b, tokens, documents


def test_the_value_is_the_difference_in_perplexity():
    a, b, tokens, documents = text(np.random.default_rng(0))
    found = paired_bootstrap(a, b, tokens, documents, Rng(0), resamples=100)
    of_a, of_b = (math.exp(-log_p.sum() / tokens.sum()) for log_p in (a, b))
    assert found.value == pytest.approx(100 * (1 - of_a / of_b))
    again = paired_bootstrap(a, b, tokens, documents, Rng(0), resamples=100)
    assert (found.low, found.high) == (again.low, again.high)


def test_the_interval_is_that_of_a_plain_loop():
    """The same resamples one by one: quantiles of many resamples agree within their own noise."""
    a, b, tokens, documents = text(np.random.default_rng(1))
    found = paired_bootstrap(a, b, tokens, documents, Rng(0), resamples=20_000)
    rng, D, percents = np.random.default_rng(2), int(documents.max()) + 1, []
    for _ in range(4000):
        rows = np.concatenate([np.flatnonzero(documents == d) for d in rng.integers(0, D, D)])
        percents.append(100 * (1 - math.exp(-(a - b)[rows].sum() / tokens[rows].sum())))
    plain = np.quantile(percents, [0.025, 0.975])
    width = plain[1] - plain[0]
    assert abs(found.low - plain[0]) < 0.15 * width
    assert abs(found.high - plain[1]) < 0.15 * width
    assert found.high - found.low > 1.02 * width  # wider, as few documents demand


def test_it_agrees_with_the_linearised_interval():
    a, b, tokens, documents = text(np.random.default_rng(3), D=200)
    found = paired_bootstrap(a, b, tokens, documents, Rng(0))
    linear = measured_rate(np.bincount(documents, a - b), np.bincount(documents, tokens))
    ends = [100 * (1 - math.exp(-end)) for end in (linear.low, linear.high)]
    assert [found.low, found.high] == pytest.approx(ends, abs=0.1 * (ends[1] - ends[0]))


def test_one_document_has_no_interval():
    found = paired_bootstrap(np.array([-1.0]), np.array([-2.0]), np.array([4.0]), np.array([7]), Rng(0))
    assert found.value == pytest.approx(100 * (1 - math.exp(-0.25)))
    assert found.interval == [None, None]


@pytest.mark.statistical
@pytest.mark.parametrize("D", [2, 3, 5])
def test_few_documents_have_an_interval_that_covers(D):
    """95 % less 5 standard errors of 1,000 repeats (false-failure rate 3e-7).

    The mutant reaches from the worst document to the best, as resamples do: it misses once in 2^(D − 1).
    """
    truth, hits, mutant = 100 * (1 - math.exp(-0.05)), 0, 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        gain, tokens = rng.normal(0.05, 0.1, D) * 20, np.full(D, 20.0)
        found = paired_bootstrap(gain, 0 * gain, tokens, np.arange(D), Rng(seed), resamples=100)
        assert found == measured_percent(gain, tokens)
        hits += found.low <= truth <= found.high
        mutant += gain.min() / 20 <= 0.05 <= gain.max() / 20
    least = 0.95 - 5 * math.sqrt(0.95 * 0.05 / 1000)
    assert hits / 1000 > least
    assert D > 3 or mutant / 1000 < least


def test_too_few_resamples_are_refused():
    with pytest.raises(UserError, match="10 resamples are too few for an interval"):
        paired_bootstrap(np.zeros(3), np.zeros(3), np.ones(3), np.arange(3), Rng(0), resamples=10)


def coverage(interval, repeats):
    """How often, and how wide."""
    truth, hits, widths = 100 * (1 - math.exp(-0.05)), 0, []
    for seed in range(repeats):
        low, high = interval(*text(np.random.default_rng(seed)), seed)
        hits += low <= truth <= high
        widths.append(high - low)
    return hits / repeats, float(np.median(widths))


@pytest.mark.statistical
def test_the_interval_covers_as_often_as_it_says():
    """25 documents; 95 % ± 5 standard errors of 1,000 repeats (false-failure rate 6e-7).

    The mutant resamples the two models' documents apart from each other: its intervals are several times too wide.
    """

    def paired(a, b, tokens, documents, seed):
        return paired_bootstrap(a, b, tokens, documents, Rng(seed), resamples=800).interval

    def unpaired(a, b, tokens, documents, seed):
        rng, D = np.random.default_rng(seed), int(documents.max()) + 1
        t = np.bincount(documents, tokens)
        rates = []
        for log_p in (a, b):
            at = rng.integers(0, D, (800, D))
            rates.append(np.bincount(documents, log_p)[at].sum(1) / t[at].sum(1))
        return np.quantile(100 * (1 - np.exp(-(rates[0] - rates[1]))), [0.025, 0.975]).tolist()

    share, width = coverage(paired, 1000)
    assert abs(share - 0.95) < 5 * math.sqrt(0.95 * 0.05 / 1000)
    assert coverage(unpaired, 50)[1] > 4 * width
