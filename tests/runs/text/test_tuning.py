"""The exact line search against a fine grid, and the weights that come of it."""

import numpy as np
import pytest
from scipy.optimize import check_grad

from freenergy import Rng, UserError
from freenergy.text.nbest.combining import Combination, Development, best_step, staircase, tune


def problem(seed, D=6, N=5, K=3, *, coarse=False):
    """Lists of one to N candidates; coarse terms make ties, equal lines and steps in the same place."""
    rng = np.random.default_rng(seed)
    terms = rng.integers(-2, 3, (D, N, K)).astype(float) if coarse else rng.normal(size=(D, N, K))
    there = np.arange(N) < rng.integers(1, N + 1, D)[:, None]
    terms = np.where(there[..., None], terms, 0.0)
    return Development(terms, np.where(there, rng.integers(0, 5, (D, N)), 0).astype(float), there, float(D))


def line(seed, coarse):
    """Weights and a direction; of whole numbers where lines shall be parallel and cross in the same place."""
    rng = np.random.default_rng(seed)
    if coarse:
        return rng.integers(-2, 3, 3) + 0.5, np.eye(3)[seed % 3]
    return rng.normal(size=3), rng.normal(size=3)


def places(steps, coarse):
    """Far out too, but not on a step; of few bits where whole numbers are to be exact."""
    grid = np.tan(np.linspace(-1.57, 1.57, 1001))
    grid = np.unique(np.round(64 * grid) / 64) if coarse else grid
    grid = np.array([place for place in grid if np.abs(steps - place).min(initial=1.0) > 1e-7])
    assert len(grid) > 200
    return grid


def slow_total(development, weights):
    """List by list, candidate by candidate; of equals the first."""
    total = 0.0
    for terms, errors, there in zip(development.terms, development.errors, development.there, strict=True):
        best = max((float(terms[i] @ weights), -i) for i in range(len(terms)) if there[i])
        total += errors[-best[1]]
    return total


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_staircase_is_the_error_along_the_line(seed, coarse):
    """At many places of the line, all but those that lie on a step."""
    development, (weights, direction) = problem(seed, coarse=coarse), line(seed, coarse)
    steps, totals = staircase(development, weights, direction)
    assert len(totals) == len(steps) + 1
    assert (np.diff(steps) >= 0).all()
    for place in places(steps, coarse):
        assert slow_total(development, weights + place * direction) == totals[np.searchsorted(steps, place)]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_step_is_as_good_as_the_best_of_a_grid(seed, coarse):
    development, (weights, direction) = problem(seed, coarse=coarse), line(seed, coarse)
    step = best_step(development, weights, direction)
    steps = staircase(development, weights, direction)[0]
    grid = places(steps, coarse)
    totals = [slow_total(development, weights + place * direction) for place in grid]
    found = slow_total(development, weights + step * direction)
    assert found <= min(totals)
    if found == slow_total(development, weights):
        assert step == 0  # nothing is gained by moving
        return
    entered = max(abs(place) for place in steps if place * step >= 0 and abs(place) <= abs(step))
    nearer = [total for place, total in zip(grid, totals, strict=True) if abs(place) < entered - 1e-7]
    assert all(total > found for total in nearer)  # else that place would have been taken


def test_the_step_by_hand():
    """Two candidates that cross at γ = 2: the second, which is right, leads beyond; no further than 1 + 2 behind it."""
    development = Development(
        np.array([[[2.0, 0.0], [0.0, 1.0]]]), np.array([[1.0, 0.0]]), np.ones((1, 2), dtype=bool), 1.0
    )
    steps, totals = staircase(development, np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    assert (steps.tolist(), totals.tolist()) == ([2.0], [1.0, 0.0])
    assert best_step(development, np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 5.0
    assert best_step(development, np.array([1.0, 0.0]), np.array([0.0, -1.0])) == -5.0


def test_a_tie_at_the_start_is_left():
    """Both candidates have the score 0 and the first is wrong: the smallest move decides, and none would not."""
    development = Development(
        np.array([[[0.0, 1.0], [0.0, 2.0]]]), np.array([[1.0, 0.0]]), np.ones((1, 2), dtype=bool), 1.0
    )
    assert best_step(development, np.array([1.0, 0.0]), np.array([0.0, 1.0])) > 0


def test_the_expected_error_and_its_gradient():
    development, weights = problem(3), np.array([0.3, -0.5, 1.0])
    expected = 0.0
    for terms, errors, there in zip(development.terms, development.errors, development.there, strict=True):
        p = np.exp(terms[there] @ weights)
        expected += float(p @ errors[there] / p.sum())
    assert development.expected(weights)[0] == pytest.approx(expected, abs=1e-12)
    gap = check_grad(lambda w: development.expected(w)[0], lambda w: development.expected(w)[1], weights)
    assert gap < 1e-5
    sharp = development.expected(1e4 * weights)[0]
    assert sharp == pytest.approx(slow_total(development, weights), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_tuning_is_as_good_as_trying_every_direction(seed):
    """Two ratios matter of three weights: a grid over the sphere, against the search."""
    development = problem(seed, D=12)
    found = tune(development, Combination([]), Rng(0))
    weights = np.array(list(found.values()))
    angles = [(u, v) for u in np.linspace(0, np.pi, 40) for v in np.linspace(0, 2 * np.pi, 80)]
    sphere = [np.array([np.cos(u), np.sin(u) * np.cos(v), np.sin(u) * np.sin(v)]) for u, v in angles]
    assert development.total(weights) <= min(development.total(direction) for direction in sphere)
    assert weights[0] == 1 or (weights[0] <= 0 and np.abs(weights).max() == 1)


@pytest.mark.parametrize("seed", range(4))
def test_terms_that_are_all_zero(seed):
    """Then all lists change in one place of a line, but for rounding, and what seems to lie between is nothing."""
    development = problem(seed, D=60, N=8)
    development.terms[..., 1:] = 0.0
    weights = np.array(list(tune(development, Combination([]), Rng(0)).values()))
    assert np.isfinite(weights).all()
    up, down = (development.total(np.array([sign, 0.0, 0.0])) for sign in (1.0, -1.0))
    assert development.total(weights) == min(up, down)


def test_units_do_not_matter():
    """A term in other units has a weight in other units, and the same lists are chosen right."""
    development = problem(4, D=12)
    units = np.array([1.0, 1000.0, 0.001])
    scaled = Development(development.terms * units, development.errors, development.there, development.units)
    start = {"base": 1.0, "energy": 1.0, "length": 0.0}
    plain = tune(development, Combination([], start), Rng(0))
    other = tune(scaled, Combination([], {"base": 1.0, "energy": 0.001, "length": 0.0}), Rng(0))
    assert list(other.values()) == pytest.approx([w / u for w, u in zip(plain.values(), units, strict=True)], rel=1e-6)


def test_weights_that_cannot_be_bettered_stay():
    development = problem(0)
    right = Development(development.terms, 0 * development.errors, development.there, 6.0)
    start = {"base": 3.0, "energy": 0.7, "length": -0.1}
    assert tune(right, Combination([], start), Rng(0)) == start


def test_the_same_seed_gives_the_same_weights():
    development = problem(5, D=40)
    assert tune(development, Combination([]), Rng(1)) == tune(development, Combination([]), Rng(1))


def test_weights_by_name():
    assert Combination(["b", "a"]).names == ("base", "energy", "a", "b", "length")
    assert Combination(["a"], {"a": 0.5}).weights == {"base": 1.0, "energy": 1.0, "a": 0.5, "length": 0.0}
    assert Combination([]).is_joint
    assert not Combination(["a"]).is_joint
    with pytest.raises(UserError, match="there is no score 'c' to give a weight to: choose of base, energy, a, length"):
        Combination(["a"], {"c": 1.0})
    for bad in ({"base": float("nan")}, {"base": 0.0, "energy": 0.0}):
        with pytest.raises(UserError, match="choose nothing"):
            Combination([], bad)


def test_lists_without_errors_are_no_development_set():
    with pytest.raises(UserError, match="no list says how wrong its candidates are"):
        Development.of([], Combination([]))
