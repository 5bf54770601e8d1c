"""Every registered estimator of log Z: one row each; and mutants that the check must refuse."""

import math
from dataclasses import replace

import pytest
import torch

from freenergy import Rng, UserError, exact_log_partition
from freenergy.core.roles import Target
from freenergy.partition import ESTIMATORS, Exact, Importance, StoppingRule, estimator_named
from freenergy.testing import World, check_estimator

CONTEXTS = ([1], [0, 1], [])
FEW = {"until.max_draws": 2, "until.check_every": 2}  # fixed beforehand, and few enough to walk every branch

# name: (settings, is it exact, does it promise E[Ẑ] = Z)
ROWS = {
    "importance": [
        (FEW, False, True),
        ({**FEW, "draw": "stratified"}, False, True),
        ({**FEW, "draw": "distinct"}, False, True),
        ({"until.max_draws": 3, "until.check_every": 2, "until.width_nats": 1e-9}, False, True),  # never narrow
        ({"until.width_nats": 0.5}, False, False),
    ],
    "exact": [({}, True, True)],
    "annealed": [
        ({"chains": 2, "schedule.temperatures": 1}, False, True),
        ({"chains": 3, "schedule.temperatures": 3, "schedule.power": 2.0}, False, False),  # E[w] = Z: test_annealed
    ],
}
each_row = pytest.mark.parametrize(
    ("name", "settings", "is_exact", "is_unbiased"), [(name, *row) for name, rows in ROWS.items() for row in rows]
)


def test_every_estimator_has_a_row():
    assert set(ROWS) == set(ESTIMATORS)


@each_row
@pytest.mark.parametrize("eos", [0, None])
def test_an_estimator_keeps_its_contract(name, settings, is_exact, is_unbiased, eos):
    world = World(2, eos=eos)
    target = world.target(None, *CONTEXTS)
    check_estimator(estimator_named(name, settings), target, is_exact=is_exact, is_unbiased=is_unbiased)


class AnyModel:
    """A model that is not a residual one: it needs a proposal."""

    def __init__(self, world):
        self.log_score = world.model.log_score


@each_row
def test_any_model_with_a_proposal(name, settings, is_exact, is_unbiased):
    world = World(2)
    target = Target(AnyModel(world), world.context, world.space, world.base)
    check_estimator(estimator_named(name, settings), target, is_exact=is_exact, is_unbiased=is_unbiased)
    with pytest.raises(UserError, match="give the target a proposal"):
        estimator_named(name, settings)(replace(target, proposal=None), Rng(0))


TWO, THREE = (Importance(until=StoppingRule(max_draws=n, check_every=n)) for n in (2, 3))


def one_draw_too_many(target, rng):
    found = TWO(target, rng)
    return replace(found, lower=found.lower + math.log(2 / 3))


def stops_by_looking(target, rng):
    two, three = TWO(target, rng), THREE(target, rng)
    return replace(two, lower=torch.where(two.lower > exact_log_partition(target), two.lower, three.lower))


def upper_for_lower(target, rng):
    found = TWO(target, rng)
    return replace(found, lower=found.upper)


@pytest.mark.parametrize("mutant", [one_draw_too_many, stops_by_looking, upper_for_lower])
def test_biased_estimates_are_refused(mutant):
    """Each is off by more than 1e-3 of Z, where right ones are within 1e-12."""
    with pytest.raises(AssertionError, match="and must be Z"):
        check_estimator(mutant, World(2, length=1).target(None, *CONTEXTS[:1]), tolerance=1e-3)


def test_a_sum_that_leaves_a_string_out_is_refused():
    def forgetful(target, rng):
        found = Exact()(target, rng)
        return replace(found, lower=found.lower - 1e-6)

    target = World(2).target(None, *CONTEXTS)
    check_estimator(Exact(), target, is_exact=True)
    with pytest.raises(AssertionError, match="lower is log Z"):
        check_estimator(forgetful, target, is_exact=True)


def test_contexts_that_share_their_random_numbers_are_refused():
    def shared(target, rng):
        return TWO(target, Rng(5).child(len(target)))

    with pytest.raises(AssertionError, match="a context alone"):
        check_estimator(shared, World(2).target(None, *CONTEXTS), is_unbiased=False)


def test_the_exact_sum_is_not_warned_of():
    world = World()
    found = Exact()(world.target(), Rng(0))
    assert found.lower.item() == pytest.approx(world.log_partition(), abs=1e-12)
    assert (found.standard_error.item(), found.verdict(), found.n) == (0, "", world.space.size)


def test_names_and_settings_that_are_not_there():
    with pytest.raises(UserError, match="no estimator of log Z 'guessed'"):
        estimator_named("guessed")
    with pytest.raises(UserError, match="has no setting 'width'"):
        estimator_named("importance", {"width": 1})
    with pytest.raises(UserError, match="draw is 'any'"):
        estimator_named("importance", {"draw": "any"})
