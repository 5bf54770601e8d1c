"""Base and policy beside the residual model: exact where the draws stand for their laws exactly."""

import math

import numpy as np
import pytest
import torch

from freenergy.evaluation.distilled import PolicyScores, as_candidates, divergences
from freenergy.evaluation.perplexity import Counts

BASE, POLICY = [8, 5, 4, 2, 1], [1, 2, 3, 3, 1]  # how often each of five strings is drawn, of 20 and of 10
LOG_BASE, LOG_PI = (torch.tensor(counts, dtype=torch.float64).div(sum(counts)).log() for counts in (BASE, POLICY))
ENERGY = torch.tensor([[1.0, 0.5, -0.5, -1.5, 0.0], [0.0, 0.0, 2.0, -2.0, 1.0]], dtype=torch.float64)  # two windows
TRUE = 3


def scored(counts):
    """Draws of a law that stand for it exactly, after the true string."""
    strings = torch.tensor([TRUE] + [x for x, count in enumerate(counts) for _ in range(count)])
    return PolicyScores(LOG_BASE[strings].expand(2, -1), LOG_PI[strings].expand(2, -1), ENERGY[:, strings])


def documents(*numbers):
    ones = np.ones(len(numbers))
    return Counts(4 * ones, ones, ones, np.array(numbers))


def test_kl_and_total_variation_are_exact():
    told = divergences(scored(BASE), scored(POLICY), documents(0, 1))
    log_p = (LOG_BASE - ENERGY).log_softmax(1)
    for name, log_m in (("before", LOG_BASE), ("after", LOG_PI)):
        kl = (log_p.exp() * (log_p - log_m)).sum(1)
        tv = (log_p.exp() - log_m.exp()).abs().sum(1) / 2
        assert told["kl"][name]["value"] == pytest.approx(kl.mean().item(), abs=1e-12)
        assert told["total_variation"][name]["value"] == pytest.approx(tv.mean().item(), abs=1e-12)
    less = (log_p.exp() * (LOG_PI - LOG_BASE)).sum(1)
    assert told["kl"]["less"]["value"] == pytest.approx(less.mean().item(), abs=1e-12)
    reach = 12.706204736432095 * (less[0] - less[1]).abs().item() / 2  # Student's t of one degree of freedom
    low, high = told["kl"]["less"]["interval"]
    assert (low, high) == pytest.approx((less.mean().item() - reach, less.mean().item() + reach))
    assert told["draws"] == 30


def test_candidates_are_compared_at_equal_numbers():
    told = as_candidates(scored(BASE), scored(POLICY), documents(0, 1))
    assert told["draws"] == 10
    for name, drawn, log_q in (("base", scored(BASE), LOG_BASE), ("distilled", scored(POLICY), LOG_PI)):
        log_weight = (drawn.log_base - drawn.energy - (drawn.log_base if name == "base" else drawn.log_pi))[:, 1:11]
        u, mean = log_weight.softmax(1), log_weight.logsumexp(1) - math.log(10)
        assert told[name]["ess"]["value"] == pytest.approx((1 / u.square().sum(1)).mean().item())
        assert told[name]["largest_share"]["value"] == pytest.approx(u.amax(1).mean().item())
        assert told[name]["log_partition"]["value"] == pytest.approx(mean.mean().item())
        own = LOG_BASE[TRUE] - ENERGY[:, TRUE]
        weights = torch.cat([(own - log_q[TRUE]).unsqueeze(1), log_weight], dim=1)
        certified = own - weights.logsumexp(1) + math.log(11)
        found = told[name]["certified_perplexity"]["value"]
        assert found == pytest.approx(math.exp(-certified.sum().item() / 8))
    assert told["distilled"]["ess"]["value"] != pytest.approx(told["base"]["ess"]["value"], rel=0.01)


def test_one_document_has_no_interval():
    told = divergences(scored(BASE), scored(POLICY), documents(0, 0))
    assert told["documents"] == 1
    assert told["kl"]["after"]["interval"] == [None, None]
