"""Ranking and detection: counted by hand, and an interval that holds the truth as often as it says."""

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, Sequences
from freenergy.core.scored import Scored
from freenergy.evaluation.perplexity import Counts
from freenergy.evaluation.ranking import RULES, detection, ranking_numbers, ranking_of

W, N = 7, 5


def scores(lengths=None):
    energy, log_base = Rng(1).normal(W, N), -5 - Rng(2).normal(W, N).abs()
    energy[0, 3] = energy[0, 0] = energy[0].min() - 1  # a tie for the first place
    lengths = torch.full((W, N), 4) if lengths is None else lengths
    x = Continuations(Sequences.from_lists([[1]] * W), torch.zeros(W, N, 4).long(), lengths)
    return Scored(x=x, log_base=log_base, log_proposal=log_base, energy=energy)


def counts(W=W):
    ones = np.ones(W)
    return Counts(ones, ones, ones, np.arange(W) // 2)


def test_first_and_pairs_are_those_counted_by_hand():
    found = scores(lengths=(1 + 4 * Rng(4).uniform(W, N)).floor().long())
    tokens = found.x.lengths.double()
    by_rule = {"likelihood": found.log_base / tokens, "energy": -found.energy, "model": found.log_score / tokens}
    numbers = ranking_numbers(found)
    for k, rule in enumerate(RULES):
        for w, (real, *drawn) in enumerate(by_rule[rule].tolist()):
            best = max(real, *drawn)
            first = (real == best) / (1 + sum(other == best for other in drawn))
            pairs = np.mean([(real > other) + (real == other) / 2 for other in drawn])
            assert numbers[w, k, :2].tolist() == pytest.approx([first, pairs])
    assert numbers[0, RULES.index("energy"), 0] == 0.5


def test_auc_is_the_share_of_pairs_of_any_two_windows():
    real, drawn = Rng(1).normal(40).numpy() + 0.7, Rng(2).normal(40).numpy()
    real[3] = drawn[5]
    found = detection(real, drawn, counts(40), Rng(0))
    assert found.value == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a in real for b in drawn]))
    assert found.low < found.value < found.high
    swapped = detection(drawn, real, counts(40), Rng(0))
    assert swapped.value == pytest.approx(1 - found.value)


def test_few_documents_have_no_interval():
    found = detection(np.arange(4.0), np.arange(4.0), counts(4), Rng(0))
    assert (found.value, found.low, found.high) == (0.5, None, None)


@pytest.mark.statistical
def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """Of 200 intervals at 95 %, fewer than 170 hold 1/2 with probability below 1e-7 (binomial); seeds are fixed."""
    held, shared, narrow = 0, Counts(*[np.ones(60)] * 3, np.arange(60) // 2), 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        of_document = np.repeat(rng.normal(size=30), 2)  # windows of a document are alike
        real, drawn = of_document + rng.normal(size=60), of_document + rng.normal(size=60)
        found = detection(real, drawn, shared, Rng(seed))
        held += found.low <= 0.5 <= found.high
        narrow += abs(found.value - 0.5) <= 0.02  # a mutant whose interval is four times too narrow
    assert held >= 170
    assert narrow < 170


def test_the_report_has_every_rule_with_its_chance():
    found = scores()
    report = ranking_of(ranking_numbers(found), counts(), N - 1, Rng(0))
    assert report["chance"]["first"] == 1 / N
    for rule in RULES:
        value, low, high = report[rule]["first"]
        assert 0 <= low <= value <= high <= 1
