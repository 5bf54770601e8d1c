"""Learning curves: each point is the fit to those windows, and the next doubling follows from three."""

import pytest
import torch

from freenergy import Rng
from freenergy.energies.features import FeatureEnergy
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.objectives import RankingNCE
from freenergy.training.convex import choose_l2
from freenergy.training.feature_cache import Pieces
from freenergy.training.learning_curve import learning_curve, next_doubling

GRID = (1e-3, 1e-1)
F = 40


class Given(FeatureEnergy):
    """An energy of features that somebody else computed."""

    def __init__(self):
        super().__init__(NgramEnergy(), [str(i) for i in range(F)])

    def features(self, x, *, leave_self_out=False):
        raise NotImplementedError


def pieces(seed, windows, negatives):
    rng = Rng(seed)
    data = rng.child("data").normal(windows, 1, F) + 0.25
    both = torch.cat([data, rng.child("noise").normal(windows, negatives, F)], dim=1)
    return Pieces((windows, 1 + negatives, F), lambda: iter(both.split(7)))


@pytest.mark.parametrize("cuts", [1, 2])
def test_each_point_is_the_fit_to_the_first_windows(cuts):
    """With two cuts every window stands twice, and both of its rows are in or out."""
    one, held_out = pieces(1, 80, 3), pieces(2, 300, 7)
    learned = Pieces.joined([one] * cuts)
    offsets = Rng(4).normal(80 * cuts, 4), Rng(5).normal(300, 8)
    energy = Given()
    curve = learning_curve([energy], [learned], [held_out], RankingNCE(), GRID, *offsets, cuts=cuts)
    assert [row["windows"] for row in curve["rows"]] == [20, 40, 80]
    assert (curve["negatives"], curve["candidates"]) == (3, 8)
    for row in curve["rows"]:
        m, other = row["windows"], Given()
        keep = (torch.arange(80) < m).repeat(cuts)
        some = Pieces.joined([one.some(torch.arange(80) < m)] * cuts)
        alone = choose_l2([other], [some], [held_out], RankingNCE(), GRID, offsets[0][keep], offsets[1])
        assert row["gain"] == pytest.approx(alone.gain, abs=1e-9)
        assert row["l2"] == alone.l2
    assert torch.allclose(energy.weight, other.weight), "the last fit is to all windows"


def test_more_windows_gain_more():
    curve = learning_curve([Given()], [pieces(1, 400, 3)], [pieces(2, 500, 7)], RankingNCE(), GRID)
    gains = [row["gain"] for row in curve["rows"]]
    assert gains[0] < gains[1] < gains[2]
    assert curve["last_doubling"] == pytest.approx(gains[2] - gains[1])
    assert curve["last_doubling_error"] < max(row["error"] for row in curve["rows"]), "paired"
    assert 0 < curve["next_doubling"] <= curve["last_doubling"]


def test_the_next_doubling():
    assert next_doubling(1.0, 2.0, 2.5) == 0.25
    assert next_doubling(1.0, 1.5, 2.5) == 1.0, "never more than the last one"
    assert next_doubling(1.0, 2.0, 1.9) == 0.0
    assert next_doubling(1.0, 0.9, 1.2) is None


def test_few_windows_have_no_curve():
    curve = learning_curve([Given()], [pieces(1, 2, 3)], [pieces(2, 5, 7)], RankingNCE(), GRID)
    assert [row["windows"] for row in curve["rows"]] == [1, 2]
    assert curve["next_doubling"] is None
