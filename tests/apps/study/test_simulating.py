"""Artificial raters show that the statistics say what they should.

no preference:   the test rejects at 5 % in at most 5 % of studies
preference p:    a pair with three votes is for B with probability q = p³ + 3p²(1 − p), so that the test rejects
                 with probability P(Binomial(n, q) ≥ k*), k* the least count with P(Binomial(n, 1/2) ≥ k*) ≤ 5 %
"""

from collections import Counter

import pytest
from scipy.stats import binom

from freenergy import UserError
from freenergy.apps.study import Store, simulate, summarise
from freenergy.apps.study import store as module
from freenergy.apps.study.assigning import answer, next_page

LEVEL = 0.05
FALSE_FAILURES = 1e-6  # of each test below


def rejections(make_study, folder, pairs, studies, *, preference, attention):
    """In how many studies each test finds that B is preferred."""
    count = Counter()
    study = make_study(folder / "study", pairs, qualification=0)
    for seed in range(studies):
        with Store(study, in_memory=True) as store:
            simulate(store, 3, preference=preference, attention=attention, seed=seed)
            tests = summarise(store)["tests"]
        count.update(name for name, test in tests.items() if test["n"] and test["p_value"] <= LEVEL)
    return count


def power(q, n):
    least = next(k for k in range(n + 1) if binom.sf(k - 1, n, 0.5) <= LEVEL)
    return binom.sf(least - 1, n, q)


def bounds(p, num):
    """Counts outside of them come with probability below ``FALSE_FAILURES``."""
    return binom.ppf(FALSE_FAILURES / 2, num, p), binom.isf(FALSE_FAILURES / 2, num, p)


@pytest.mark.statistical
def test_without_a_preference_it_seldom_rejects(make_study, tmp_path):
    """With votes dropped by attention checks, too: that is what makes ties."""
    _, high = bounds(LEVEL, 60)
    found = rejections(make_study, tmp_path, 40, 60, preference=0.5, attention=0.7)
    assert found["decided"] <= high
    assert found["not_worse"] > high  # mutant: ties count for B


@pytest.mark.statistical
def test_the_power_is_what_the_binomial_says(make_study, tmp_path, monkeypatch):
    p, how = 0.75, {"preference": 0.75, "attention": 1.0}
    low, high = bounds(power(p**3 + 3 * p**2 * (1 - p), 12), 50)
    assert low <= rejections(make_study, tmp_path, 12, 50, **how)["decided"] <= high
    monkeypatch.setattr(module, "chosen", lambda first, side: "ab"[side - 1])  # mutant: sides are not undone
    assert not low <= rejections(make_study, tmp_path, 12, 50, **how)["decided"] <= high


def test_the_level_and_power_of_the_test_itself():
    assert power(0.5, 12) <= LEVEL < power(0.6, 12)
    assert power(0.5, 333) <= LEVEL
    assert power(0.648, 333) > 0.999


@pytest.mark.statistical
def test_votes_follow_the_preference_and_checks_the_attention(make_study, tmp_path):
    """360 votes of 0.6 and their checks of 0.9, each within 5 standard deviations: fails once in 10⁶."""
    with Store(make_study(tmp_path / "study", 120, qualification=12), in_memory=True) as store:
        simulate(store, 8, preference=0.6, attention=0.9)
        found = summarise(store)
    given = found["votes"]["given"]
    assert given == 360
    assert found["pairs"]["complete"] == 120
    for_b = sum(rater["for_b"] for rater in found["by_rater"])
    kept = found["votes"]["kept"]
    assert abs(for_b - 0.6 * kept) < 5 * (kept * 0.24) ** 0.5
    asked = found["attention"]["asked"]
    assert abs(found["attention"]["failed"] - 0.1 * asked) < 5 * (asked * 0.09) ** 0.5
    first = sum(rater["text_1"] for rater in found["by_rater"])
    assert abs(first - 180) < 5 * 360**0.5 / 2  # sides are shuffled, so a preference leaves them even
    assert abs(found["agreement"]["alpha"]) < 0.3  # votes are independent: 0, with a standard deviation of 0.05


def test_the_same_seed_votes_the_same(make_study, tmp_path):
    study = make_study(tmp_path / "study", 6)

    def votes(seed):
        with Store(study, in_memory=True) as store:
            simulate(store, 3, preference=0.5, seed=seed)
            return summarise(store)["by_pair"]

    assert votes(0) == votes(0) != votes(1)


def test_raters_who_cannot_tell_are_sent_home(make_store):
    store = make_store(qualification=12)
    simulate(store, 4, attention=0.0)
    found = summarise(store)
    assert found["raters"] == {"invited": 4, "simulated": 4, "qualified": 0, "not_qualified": 4, "voted": 0}


@pytest.mark.parametrize("wrong", [{"preference": 1.5}, {"attention": -0.1}])
def test_odd_values(make_store, wrong):
    with pytest.raises(UserError, match="probability"):
        simulate(make_store(), 2, **wrong)


def test_nobody_is_simulated_among_people(make_store, sides):
    store = make_store()
    store.invite(1)
    rater = store.raters()[0]
    simulate(store, 1)  # nobody has voted yet
    page = next_page(store, rater)
    answer(store, rater, page.token, sides(page, lambda item: "b"))
    with pytest.raises(UserError, match="on a copy"):
        simulate(store, 1)
    assert len(store.raters()) == 2
