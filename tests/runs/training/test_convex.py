"""The convex fit: its slope, its one optimum, and the truth where the truth is known."""

import math

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, UserError
from freenergy.core.roles import Loss, Scores
from freenergy.core.sequences import Sequences
from freenergy.energies.features import FeatureEnergy
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.objectives import BinaryNCE, RankingNCE
from freenergy.partition.certificate import certified_gain
from freenergy.training import convex
from freenergy.training.feature_cache import Pieces

OBJECTIVES = {
    "binary": BinaryNCE(),
    "noise ratio 3": BinaryNCE(noise_ratio=3.0),
    "conditional": BinaryNCE(kind="conditional"),
}


def in_memory(function, places=(1,)):
    """The function of features that are pairs of tensors, of data and of negatives, instead of ``Pieces``."""

    def pieces(pair):
        return pair if isinstance(pair, Pieces) else in_pieces([pair], len(pair[0]))[0]

    def call(*given, **more):
        return function(*([*map(pieces, each)] if i in places else each for i, each in enumerate(given)), **more)

    return call


_Problem, fit_convex = in_memory(convex._Problem), in_memory(convex.fit_convex)
cross_fitted, joint_energy = in_memory(convex.cross_fitted), in_memory(convex.joint_energy)
choose_l2 = in_memory(convex.choose_l2, (1, 2))


class Given(FeatureEnergy):
    """An energy of features that somebody else computed."""

    def __init__(self, num):
        super().__init__(NgramEnergy(), [str(i) for i in range(num)])

    def features(self, x, *, leave_self_out=False):
        raise NotImplementedError


class OneHot(FeatureEnergy):
    """One weight for each string of a space."""

    def __init__(self, space):
        self.strings = {tuple(x): i for i, x in enumerate(space.enumerate().lists())}
        super().__init__(NgramEnergy(), [str(x) for x in self.strings])

    def features(self, x, *, leave_self_out=False):
        index = torch.tensor([[self.strings[tuple(y)] for y in row] for row in x.lists()])
        return torch.nn.functional.one_hot(index, len(self.strings)).double()


def material(seed=0, windows=60, negatives=4, sizes=(3, 5)):
    """Features of which some tell data from negatives."""
    rng, found = Rng(seed), []
    for i, size in enumerate(sizes):
        data = rng.child("data", i).normal(windows, 1, size) * 2 + torch.linspace(-1, 1, size).double() + 5
        found.append((data, rng.child("noise", i).normal(windows, negatives, size) + 5))
    return [Given(size) for size in sizes], found


@pytest.mark.parametrize("objective", [*OBJECTIVES.values(), RankingNCE()])
def test_the_slope_is_that_of_finite_differences(objective):
    parts, features = material()
    offset = Rng(3).normal(60, 5)
    problem = _Problem(parts, features, objective, offset)
    at, step = Rng(4).normal(problem.size).numpy() * 0.3, 1e-5
    _, slope = problem.value_and_slope(at, 0.7)
    for i in range(problem.size):
        bump = np.eye(problem.size)[i] * step
        up, down = (problem.value_and_slope(at + sign * bump, 0.7)[0] for sign in (1, -1))
        assert math.isclose(slope[i], (up - down) / (2 * step), abs_tol=1e-7), f"coordinate {i}"


@pytest.mark.parametrize("objective", [*OBJECTIVES.values(), RankingNCE()])
def test_there_is_one_optimum(objective):
    parts, features = material()
    problem = _Problem(parts, features, objective, None)
    starts = [np.zeros(problem.size), Rng(5).normal(problem.size).numpy() * 2 * ([1] * 8 + [problem.has_bias])]
    (first, one), (second, two) = (problem.solve(0.01, start) for start in starts)
    assert first.converged
    assert second.converged
    np.testing.assert_allclose(one, two, atol=1e-4)
    assert first.value < problem.value_and_slope(np.zeros(problem.size), 0.01)[0] - 0.01


def test_the_parts_give_the_value_that_was_found():
    parts, features = material()
    offset = Rng(3).normal(60, 5)
    fit = fit_convex(parts, features, BinaryNCE(), 0.02, offset)
    assert fit.converged
    assert fit.iterations > 2
    E = joint_energy(parts, features) + offset
    value = float(BinaryNCE()(Scores.relative(E[:, :1]), Scores.relative(E[:, 1:])).value)
    norm = sum(part.weight.square().sum().item() for part in parts)
    assert math.isclose(value + 0.02 * norm / 2, fit.value, abs_tol=1e-9)
    assert parts[0].bias != 0
    assert parts[1].bias == 0
    everything = torch.cat([*(block.flatten(0, 1) for block in features[0])])
    torch.testing.assert_close(parts[0].mean, everything.mean(0))
    torch.testing.assert_close(parts[0].scale, everything.std(0, correction=0))


def test_a_ranking_objective_leaves_the_constant_at_zero():
    parts, features = material()
    fit_convex(parts, features, RankingNCE(), 0.01)
    assert [part.bias.item() for part in parts] == [0, 0]
    assert parts[0].weight.abs().max() > 0.1


def test_features_in_single_precision_converge_to_nearly_the_same():
    parts, features = material()
    fit = fit_convex(parts, features, RankingNCE(), 0.01)
    again, single = material()[0], [(data.float(), noise.float()) for data, noise in features]
    rough = fit_convex(again, single, RankingNCE(), 0.01)
    assert rough.converged
    assert math.isclose(rough.value, fit.value, abs_tol=1e-6)


class Weighted:
    """Binary NCE with exact expectations: one string a row, weighted by its probability as datum and as noise."""

    kind = "weighted"

    def __init__(self, data, noise):
        self.data, self.noise = data, noise

    def __call__(self, data, negatives):
        value = -(self.data * torch.nn.functional.logsigmoid(data.logit[:, 0])).sum()
        return Loss(value - (self.noise * torch.nn.functional.logsigmoid(-negatives.logit[:, 0])).sum(), {})


def test_with_a_weight_for_each_string_the_model_becomes_the_truth():
    """P_LM · exp(−E) = P_data for every string, with Z = 1 unasked for, when both laws are known exactly."""
    space = SequenceSpace(vocab_size=3, length=3, eos=0)
    truth, base = TabularLM.random(Rng(1), vocab_size=3, order=2), TabularLM.random(Rng(2), vocab_size=3, order=1)
    strings = space.enumerate()
    x = Continuations(Sequences.from_lists([[1]]), strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    log_truth, log_base = truth.log_prob(x), base.log_prob(x)
    energy = OneHot(space)
    features = energy.features(x).transpose(0, 1)  # one string a row
    objective = Weighted(log_truth[0].exp(), log_base[0].exp())
    fit = fit_convex([energy], [(features, features)], objective, 0.0)
    assert fit.converged
    log_model = (log_base - energy(x))[0]
    torch.testing.assert_close(log_model.exp(), log_truth[0].exp(), atol=1e-4, rtol=0)
    assert abs(log_model.logsumexp(0).item()) < 1e-4
    assert (log_base - log_truth).abs().max() > 0.5  # there was something to learn


def test_the_penalty_is_chosen_on_held_out_windows():
    """Three true features among forty, and few windows: too little penalty overfits, too much learns nothing."""
    rng, size = Rng(8), 40

    def draw(name, windows):
        data = rng.child(name, "data").normal(windows, 1, size)
        data[..., :3] += 1.0
        return [(data, rng.child(name, "noise").normal(windows, 5, size))]

    part, learned, held_out = Given(size), draw("train", 40), draw("validation", 300)
    grid = (1e-6, 1e-1, 1e3)
    choice = choose_l2([part], learned, held_out, RankingNCE(), grid)
    assert choice.l2 == 1e-1
    assert choice.gain == max(gain for _, gain in choice.table)
    assert [l2 for l2, _ in choice.table] == [1e3, 1e-1, 1e-6]
    E = joint_energy([part], held_out)
    assert math.isclose(float(certified_gain(E[:, :1], E[:, 1:]).mean()), choice.gain, abs_tol=1e-12)
    alone = Given(size)
    fit_convex([alone], learned, RankingNCE(), 1e-1)
    torch.testing.assert_close(alone.weight, part.weight, atol=1e-4, rtol=0)


def test_cross_fitted_energies_are_those_of_fits_without_the_window():
    parts, features = material()
    offset = Rng(3).normal(60, 5)
    fit_convex(parts, features, RankingNCE(), 1e-2, offset)
    before = [part.state_dict()[name].clone() for part in parts for name in part.state_dict()]
    E = cross_fitted(parts, features, RankingNCE(), 1e-2, offset, folds=3)
    assert all(map(torch.equal, before, [part.state_dict()[name] for part in parts for name in part.state_dict()]))
    others = torch.arange(60) % 3 != 1
    fit_convex(parts, [(d[others], n[others]) for d, n in features], RankingNCE(), 1e-2, offset[others])
    torch.testing.assert_close(E[~others], joint_energy(parts, [(d[~others], n[~others]) for d, n in features]))
    parts, features = material(windows=1)
    assert not cross_fitted(parts, features, RankingNCE(), 1e-2).any()


def test_cross_fitted_energies_do_not_flatter():
    """More weights than windows, and nothing to learn: the fit tells its own pairs, and no others.

    The bounds are 6 standard errors of 300 pairs from one half: a false failure in some 1e-8 of seeds.
    """
    rng = Rng(5)
    features = [(rng.child("data").normal(60, 1, 200), rng.child("noise").normal(60, 5, 200))]
    part = Given(200)
    fit_convex([part], features, RankingNCE(), 1e-3)
    own, crossed = joint_energy([part], features), cross_fitted([part], features, RankingNCE(), 1e-3)
    right = [(E[:, :1] < E[:, 1:]).double().mean().item() for E in (own, crossed)]
    assert right[0] > 0.95
    assert abs(right[1] - 0.5) < 0.18


def test_the_fit_is_deterministic():
    found = []
    for _ in range(2):
        parts, features = material()
        fit_convex(parts, features, BinaryNCE(), 1e-3)
        found.append(torch.cat([part.weight.detach() for part in parts]))
    assert torch.equal(*found)


def test_what_cannot_be_is_said():
    parts, features = material()
    with pytest.raises(UserError, match="give features for each energy"):
        fit_convex(parts, features[:1], BinaryNCE(), 0.1)
    with pytest.raises(UserError, match="same windows and negatives"):
        fit_convex(parts, [features[0], (features[1][0], features[1][1][:, :2])], BinaryNCE(), 0.1)
    with pytest.raises(UserError, match="l2 is -1"):
        fit_convex(parts, features, BinaryNCE(), -1.0)


def in_pieces(features, step):
    """The same features, ``step`` windows a piece."""
    both = [torch.cat(each, dim=1) for each in features]
    return [Pieces(tuple(each.shape), lambda each=each: iter(each.split(step))) for each in both]


@pytest.mark.parametrize("objective", [*OBJECTIVES.values(), RankingNCE()])
def test_features_in_pieces_on_disk_have_the_same_optimum(objective, tmp_path, monkeypatch):
    offset, found = Rng(3).normal(60, 5), []
    for step, batch_size, scratch in [(60, 1 << 22, None), (7, 8 * 5 * 11, tmp_path)]:
        monkeypatch.setattr("freenergy.training.convex._BATCH_SIZE", batch_size)
        parts, features = material()
        fit = fit_convex(parts, in_pieces(features, step), objective, 0.02, offset, scratch=scratch)
        assert fit.converged
        found.append((fit.value, torch.cat([part.weight.detach() for part in parts]), parts[0].bias.item()))
    (value, weight, bias), (other_value, other_weight, other_bias) = found
    assert math.isclose(value, other_value, abs_tol=1e-9)
    torch.testing.assert_close(weight, other_weight, atol=1e-6, rtol=0)
    assert math.isclose(bias, other_bias, abs_tol=1e-6)
    assert not list(tmp_path.iterdir())  # nothing is left on disk


def test_value_and_slope_do_not_depend_on_chunks(tmp_path, monkeypatch):
    at, found = None, []
    for batch_size in (1 << 22, 1):  # all windows together, and one by one
        monkeypatch.setattr("freenergy.training.convex._BATCH_SIZE", batch_size)
        parts, features = material()
        problem = _Problem(parts, in_pieces(features, 11), BinaryNCE(), Rng(3).normal(60, 5), tmp_path)
        at = Rng(4).normal(problem.size).numpy() * 0.3
        found.append((*problem.value_and_slope(at, 0.7), problem.has_bias))
    assert math.isclose(found[0][0], found[1][0], abs_tol=1e-12)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-12)
    assert found[0][2]
    assert found[1][2]


def test_cross_fitted_energies_in_pieces(tmp_path):
    parts, features = material()
    whole = cross_fitted(parts, features, RankingNCE(), 1e-2, folds=3)
    pieces = cross_fitted(parts, in_pieces(features, 7), RankingNCE(), 1e-2, folds=3, scratch=tmp_path)
    torch.testing.assert_close(whole, pieces, atol=1e-5, rtol=0)
    assert whole.abs().max() > 0.1
