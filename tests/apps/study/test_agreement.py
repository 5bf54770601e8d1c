"""Krippendorff's α against his own worked examples, and against the sum over pairs of votes."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Rng
from freenergy.apps.study.summary import agreement


def counted(raters):
    """Votes of raters (a string each, a dot is no vote) as counts of each value in each unit."""
    values = sorted(set("".join(raters)) - {"."})
    return np.array([[sum(r[u] == value for r in raters) for value in values] for u in range(len(raters[0]))], float)


@pytest.mark.parametrize(
    ("raters", "alpha"),
    [
        (["0100000010", "1110010000"], 0.095),
        (["aabbdcccedda", "babbbccceddd"], 0.692),
        (["123321412...", "1233224125.3", ".3332342251.", "12332441251."], 0.743),
    ],
)
def test_krippendorff_s_examples(raters, alpha):
    """Examples A, B and C of Krippendorff (2011), Computing Krippendorff's Alpha-Reliability."""
    assert agreement(counted(raters), Rng(0)).alpha == pytest.approx(alpha, abs=5e-4)


def slow(counts):
    """α and the share of agreeing pairs from the coincidence matrix, pair of votes by pair of votes."""
    C = counts.shape[1]
    coincidences, agreeing, pairs = np.zeros((C, C)), 0, 0
    for row in counts.astype(int):
        votes = [c for c in range(C) for _ in range(row[c])]
        for c, k in permutations(votes, 2):
            coincidences[c, k] += 1 / (len(votes) - 1)
            agreeing, pairs = agreeing + (c == k), pairs + 1
    n_c = coincidences.sum(1)
    n = n_c.sum()
    expected = (np.outer(n_c, n_c) - np.diag(n_c)) / (n - 1)
    off = ~np.eye(C, dtype=bool)
    alpha = 1 - coincidences[off].sum() / expected[off].sum() if expected[off].sum() else None
    return alpha, agreeing / pairs


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_it_is_the_sum_over_pairs_of_votes(rows):
    counts = np.array(rows, float)
    found = agreement(counts, Rng(0))
    assert found.units == sum(a + b >= 2 for a, b in rows)
    if not found.units:
        assert (found.share, found.alpha, found.interval) == (None, None, None)
        return
    alpha, share = slow(counts)
    assert found.share == pytest.approx(share, abs=1e-12)
    assert found.alpha == (None if alpha is None else pytest.approx(alpha, abs=1e-12))


def test_the_interval_is_wide_for_few_units_and_holds_zero_for_coins():
    coins = np.stack([Rng(1).uniform(200, 3).numpy().round().sum(1)] * 2, 1)
    coins[:, 1] = 3 - coins[:, 0]
    few, many = agreement(coins[:20], Rng(0)), agreement(coins, Rng(0))
    assert many.interval[0] < 0 < many.interval[1]
    assert many.interval[0] < many.alpha < many.interval[1]
    assert few.interval[1] - few.interval[0] > 2 * (many.interval[1] - many.interval[0])
    assert agreement(coins, Rng(0)) == many
    perfect = agreement(np.array([[3.0, 0.0], [0.0, 3.0]] * 10), Rng(0))
    assert (perfect.share, perfect.alpha, perfect.interval) == (1.0, 1.0, (1.0, 1.0))
