"""Is one way to choose better than another? Against a plain loop, and against worlds where neither is."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from freenergy import Rng
from freenergy.evaluation.perplexity import measured_rate
from freenergy.text.nbest.nbest import NBest
from freenergy.text.nbest.significance import Tally, compare


def errors(rng, D, better=0.0):
    """Two systems on D documents that are hard or easy for both; the first may make fewer errors."""
    words = rng.integers(5, 30, D)
    hard = rng.beta(2, 6, D)
    a, b = (rng.binomial(words, np.clip(hard * (1 - by), 0, 1)) for by in (better, 0.0))
    return a.astype(float), b.astype(float), words.astype(float)


def test_the_interval_is_that_of_a_plain_loop():
    """The same resamples one by one: quantiles of many agree within their own noise, and with the widening for D."""
    a, b, words = errors(np.random.default_rng(1), 40, better=0.3)
    found = compare(a, b, words, Rng(0), resamples=20_000)
    rng, gaps = np.random.default_rng(2), []
    for _ in range(4000):
        at = rng.integers(0, 40, 40)
        gaps.append((a[at].sum() - b[at].sum()) / words[at].sum())
    low, high = np.quantile(gaps, [0.025, 0.975])
    assert found.difference.value == pytest.approx((a.sum() - b.sum()) / words.sum())
    assert abs(found.difference.low - low) < 0.15 * (high - low)
    assert abs(found.difference.high - high) < 0.15 * (high - low)
    again = compare(a, b, words, Rng(0), resamples=20_000)
    assert found == again


def test_the_p_value_belongs_to_the_interval():
    """p < 5 % exactly where 0 is outside; the p-value is that of the t-test where documents are equally long."""
    gaps = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        a, b, n = rng.normal(0.25, 1.0, 30), rng.normal(0.0, 1.0, 30), np.ones(30)
        found = compare(a, b, n, Rng(seed), resamples=20_000)
        if abs(found.p_value - 0.05) > 0.005:
            assert (found.p_value < 0.05) == (found.difference.low > 0 or found.difference.high < 0)
        gaps.append(abs(found.p_value - ttest_rel(a, b).pvalue))
    assert max(gaps) < 0.06
    assert np.mean(gaps) < 0.012


def test_few_documents_have_the_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 0.5, 4), rng.normal(0.0, 0.5, 4)
    found = compare(a, b, np.ones(4), Rng(0))
    assert found.p_value == pytest.approx(ttest_rel(a, b).pvalue, rel=1e-9)
    assert found.difference == measured_rate(a - b, np.ones(4))


def test_what_tells_nothing():
    one = np.array([1.0])
    assert compare(one, 0 * one, one, Rng(0)).p_value is None
    same = np.arange(20.0)
    found = compare(same, same, np.ones(20), Rng(0))
    assert (found.p_value, found.difference.to_json()) == (1.0, [0.0, 0.0, 0.0])
    assert compare(same, same, np.zeros(20), Rng(0)).difference.value is None  # references without words


def p_values(repeats, better):
    worlds = (errors(np.random.default_rng(seed), 25, better) for seed in range(repeats))
    return np.array([compare(*world, Rng(seed), resamples=400).p_value for seed, world in enumerate(worlds)])


@pytest.mark.statistical
def test_chance_is_called_a_difference_as_often_as_it_says():
    """Neither is better: p < 5 % in at most 5 % of 1,200 worlds, plus 5 standard errors (false-failure rate 3e-7).

    The mutant forgets that either side may be the better one and halves p: it cries wolf about twice as often. A real
    difference is seen in most worlds.
    """
    p, most = p_values(1200, 0.0), 0.05 + 5 * math.sqrt(0.05 * 0.95 / 1200)
    assert 0.01 < (p < 0.05).mean() < most
    assert (p / 2 < 0.05).mean() > most
    assert (p_values(100, 0.5) < 0.05).mean() > 0.8


def test_a_tally_counts_by_document():
    tally = Tally()
    lists = [("d", 1, 3), ("e", 0, 5), ("d", 2, 2), (None, 4, 6), (None, 1, 1)]
    for line, (document, wrong, words) in enumerate(lists):
        one = NBest(line=line, candidates=("x",), reference=" ".join(["w"] * words), document=document)
        tally.add(one, {"first": float(wrong), "oracle": 0.0})
    assert tally.unit == "word"
    assert len(tally) == 5
    assert tally.units.tolist() == [5, 5, 6, 1]
    assert tally.errors("first").tolist() == [3, 0, 4, 1]
    assert tally.rates()["first"][0] == pytest.approx(8 / 17)
    assert tally.rates()["oracle"] == [0, 0, 0]
    found = tally.compare("first", "oracle", Rng(0), 100)
    assert (found["system"], found["against"], found["difference"][0]) == ("first", "oracle", pytest.approx(8 / 17))
