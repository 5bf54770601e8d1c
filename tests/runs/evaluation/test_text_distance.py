"""The kernel distance is unbiased, its interval covers, and a model that writes like the data is nearest."""

from itertools import product

import numpy as np
import pytest

from freenergy.core.sequences import Continuations
from freenergy.evaluation.text_distance import Distance, distances_to_human, mean_states
from freenergy.testing.networks import tiny_network

POINTS = np.array([[0.0, 1.0], [2.0, -1.0], [1.0, 1.5]])
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def kernel(a, b):
    return (a @ b.T / 2 + 1) ** 3


def test_its_mean_over_all_draws_is_the_distance_of_the_laws():
    K = kernel(POINTS, POINTS)
    truth = P @ K @ P + Q @ K @ Q - 2 * P @ K @ Q
    mean = 0.0
    for x1, x2, y1, y2 in product(range(3), repeat=4):
        chance = P[x1] * P[x2] * Q[y1] * Q[y2]
        mean += chance * Distance.of(POINTS[[x1, x2]], POINTS[[y1, y2]], np.array([7, 9])).value
    assert mean == pytest.approx(truth, abs=1e-12)


def test_windows_of_one_document_are_never_paired():
    """Two equal windows of a document would be taken for proof that the laws have a mode there."""
    rng = np.random.default_rng(0)
    human, model, documents = rng.normal(size=(6, 4)), rng.normal(size=(6, 4)), np.array([0, 0, 1, 1, 1, 2])
    pairs = [(i, j) for i, j in product(range(6), repeat=2) if documents[i] != documents[j]]
    K = [(a @ b.T / 4 + 1) ** 3 for a, b in ((human, human), (model, model), (human, model), (model, human))]
    wanted = np.mean([K[0][i, j] + K[1][i, j] - K[2][i, j] - K[3][i, j] for i, j in pairs])
    found = Distance.of(human, model, documents)
    assert found.value == pytest.approx(wanted, abs=1e-12)
    assert found.moved.sum() == pytest.approx(0, abs=1e-12)
    assert Distance.of(human, model, np.zeros(6, int)) is None


def test_the_interval_covers():
    """95 % of 400 intervals: fewer than 355 or all of them have a chance below 1e-6 at the nominal rate."""
    K = kernel(POINTS, POINTS)
    truth = P @ K @ P + Q @ K @ Q - 2 * P @ K @ Q
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        x, y = POINTS[rng.choice(3, 60, p=P)], POINTS[rng.choice(3, 60, p=Q)]
        _, low, high = Distance.of(x, y, np.arange(60)).measured().to_json()
        covered += low <= truth <= high
    assert 355 <= covered < 400


def test_the_model_that_writes_like_the_data_is_nearer():
    rng = np.random.default_rng(2)
    states = {name: rng.normal(shift, 1, size=(80, 8)) for name, shift in (("human", 0), ("base", 0.8), ("model", 0))}
    found = distances_to_human(states, ["human", "base", "model"], np.arange(80) // 2)
    assert found["base"]["distance"][1] > 0
    assert found["model"]["nearer"][1] > 0
    assert found["base"]["nearer"] == [0, 0, 0]
    assert not distances_to_human(states, ["human", "base", "model"], np.zeros(80, int)), "one document"


def test_states_are_those_of_the_trace():
    lm = tiny_network("GPT2", vocab_size=5)
    x = Continuations.from_lists([[1, 2], [3]], [[[1, 2, 3]], [[4, 4, 1]]])
    found = mean_states(lm, x)
    assert found.shape == (2, 16)
    np.testing.assert_allclose(found, lm.trace(x, (2,)).states[:, 0, 0].numpy(), atol=1e-6)
