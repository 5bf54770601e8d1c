"""Baselines beside base and joint: who is better is said in words, and rightly."""

import math

import numpy as np
import pytest

from freenergy import Rng
from freenergy.evaluation.bootstrap import Compared, compare
from freenergy.evaluation.perplexity import Counts


def counts(W=40):
    tokens = np.random.default_rng(0).integers(5, 20, W).astype(float)
    return Counts(tokens, tokens / 2, 4 * tokens, np.arange(W))


@pytest.mark.parametrize(
    ("better", "words"),
    [
        (0.3, "the residual model loses to it: perplexity is 2"),
        (-0.3, "the residual model is better"),
        (0.0, "no difference"),
    ],
)
def test_the_verdict_says_who_wins(better, words):
    known, rng = counts(), np.random.default_rng(1)
    base = -4 * known.token
    certified = base + 0.1 * known.token
    baseline = certified + (better + rng.normal(0, 0.2, 40)) * known.token
    found = compare(Compared(baseline, base, known), Compared(baseline, certified, known), Rng(0))
    assert words in found["verdict"]
    assert found["perplexity"] == pytest.approx(math.exp(-baseline.sum() / known.token.sum()))
    assert found["per_byte"] == pytest.approx(math.exp(-baseline.sum() / known.token.sum() / 4))
    of_base = 100 * (1 - found["perplexity"] / math.exp(4))
    assert found["against_base"]["percent"] == pytest.approx(of_base)
    low, high = found["against_joint"]["interval"]
    assert low < found["against_joint"]["percent"] < high


def test_without_a_joint_model_there_is_nothing_to_lose():
    known = counts()
    found = compare(Compared(-3 * known.token, -4 * known.token, known), None, Rng(0))
    assert found["verdict"] == ""
    assert "against_joint" not in found
