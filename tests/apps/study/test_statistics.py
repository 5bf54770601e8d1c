"""The binomial test against plain sums, and the counts behind Table 2 of Deng et al. (2020)."""

from decimal import Decimal
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from freenergy import UserError
from freenergy.apps.study.summary import Outcomes, Preference

# Table 2, from top to bottom: Model1, Model2, rate in percent, p-value
TABLE_2 = {
    "Base LM < Joint UniT": ("52.85", "0.16"),
    "Base LM < Joint BiT-Base": ("56.25", "0.015"),
    "Base LM < Joint BiT-Large*": ("58.93", "0.00084"),
    "Base LM < BALM": ("46.77", "0.88"),
    "BALM < Joint UniT": ("50.00", "0.52"),
    "BALM < Joint BiT-Base": ("57.89", "0.0027"),
    "BALM < Joint BiT-Large*": ("59.89", "0.00020"),
    "BALM-24L < Joint BiT-Med": ("56.23", "0.015"),
    "Joint BiT-Large* (24L) < Human": ("55.21", "0.036"),
    "Base LM ≤ BALM": ("54.85", "0.050"),
}


@given(st.integers(1, 120).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_p_value_is_the_sum_of_the_upper_tail(counts):
    k, n = counts
    found = Preference.of(k, n)
    assert found.p_value == pytest.approx(sum(comb(n, i) for i in range(k, n + 1)) / 2**n, rel=1e-9)
    assert found.p_value == binomtest(k, n, 0.5, alternative="greater").pvalue
    assert found.rate == k / n


@pytest.mark.parametrize(("k", "n"), [(188, 319), (0, 10), (10, 10), (3, 7)])
def test_the_interval_is_where_each_tail_is_a_fortieth(k, n):
    """Clopper and Pearson: at the lower end P(X ≥ k) = 2.5 %, at the upper end P(X ≤ k) = 2.5 %."""
    low, high = Preference.of(k, n).interval

    def tail(p, numbers):
        return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in numbers)

    if k > 0:
        assert tail(low, range(k, n + 1)) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert tail(high, range(k + 1)) == pytest.approx(0.025, rel=1e-6)
    assert low <= k / n <= high


def test_ties_are_counted_in_three_ways():
    votes = [(0, 3), (1, 2), (0, 1), (3, 0), (1, 1), (2, 2), (0, 0)]
    outcomes = Outcomes.of(votes)
    assert outcomes == Outcomes(a=1, b=3, ties=2)  # nobody voted on the last, which is no tie
    tests = {name: (test.k, test.n) for name, test in outcomes.tests().items()}
    assert tests == {"decided": (3, 4), "strict": (3, 6), "not_worse": (5, 6)}


def test_without_votes_there_is_nothing_to_test():
    tests = Outcomes.of([(0, 0)]).tests()
    assert {(test.n, test.rate, test.p_value, test.interval) for test in tests.values()} == {(0, None, None, None)}
    with pytest.raises(UserError, match="5 of 3 pairs"):
        Preference.of(5, 3)


def counts_behind(percent, p_value, max_n):
    """Yield every k of n ≤ ``max_n`` whose rate and one-sided p-value round to what is printed."""
    for n in range(1, max_n + 1):
        middle = round(float(percent) / 100 * n)
        for k in (middle - 1, middle, middle + 1):
            if 0 <= k <= n and _rounds_to(100 * k / n, percent):
                found = Preference.of(k, n).p_value
                if found is not None and _rounds_to(found, p_value):
                    yield k, n


def _rounds_to(value, printed):
    """Whether a number rounds to a printed one; halves may be rounded either way."""
    shown = Decimal(printed)
    half = Decimal(5).scaleb(int(shown.as_tuple().exponent) - 1)
    return abs(Decimal(value) - shown) <= half * (1 + Decimal("1e-9"))


def test_the_counts_behind_table_2():
    """Where there are counts of at most 333 sentences they are the only ones, but for the row of 50 %."""
    found = {row: list(counts_behind(*printed, 333)) for row, printed in TABLE_2.items()}
    assert found.pop("BALM < Joint UniT") == [(k, 2 * k) for k in range(128, 167)]
    assert found == {
        "Base LM < Joint UniT": [(176, 333)],
        "Base LM < Joint BiT-Base": [(180, 320)],
        "Base LM < Joint BiT-Large*": [(188, 319)],
        "Base LM < BALM": [(145, 310)],
        "BALM < Joint BiT-Base": [(187, 323)],
        "BALM < Joint BiT-Large*": [],
        "BALM-24L < Joint BiT-Med": [],
        "Joint BiT-Large* (24L) < Human": [(175, 317)],
        "Base LM ≤ BALM": [],
    }


@pytest.mark.parametrize(
    ("row", "k", "n", "rate", "p"),
    [
        ("BALM < Joint BiT-Large*", 197, 329, "59.88", "0.00020"),
        ("BALM-24L < Joint BiT-Med", 176, 313, "56.23", "0.016"),
        ("Base LM ≤ BALM", 170, 310, "54.84", "0.050"),
    ],
)
def test_the_rows_without_counts_miss_by_one_in_the_last_digit(row, k, n, rate, p):
    assert (k, n) in counts_behind(rate, p, 333)
    printed = TABLE_2[row]
    assert (rate == printed[0]) != (p == printed[1])
    assert abs(float(rate) - float(printed[0])) < 0.011
    assert abs(float(p) - float(printed[1])) < 0.0011


def test_table_2_counts_ties_in_n():
    """Base LM against BALM has both rows: one set of votes with ties in n gives them, none without."""
    outcomes = Outcomes(a=140, b=145, ties=25)
    less, not_greater = (outcomes.tests()[name] for name in ("strict", "not_worse"))
    assert (less.k, less.n) in counts_behind(*TABLE_2["Base LM < BALM"], 333)
    assert (not_greater.k, not_greater.n) in counts_behind("54.84", TABLE_2["Base LM ≤ BALM"][1], 333)
    (k, decided), most = next(counts_behind(*TABLE_2["Base LM < BALM"], 333)), 333
    assert max((k + ties) / (decided + ties) for ties in range(most - decided + 1)) < 0.505  # not 0.5485
