"""Spans and scores against seqeval, intervals against their own law."""

import numpy as np
import pytest
from scipy.stats import binom

from freenergy import Rng, UserError
from freenergy.tagging.scores import ACCURACY, F1, confusions, count, differences, intervals, rates
from freenergy.tagging.spans import has_spans, in_scheme, spans_of

TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("X", "Y"))]


def random_tags(rng, sentences, tags=TAGS):
    lengths = (rng.uniform(sentences) * 12 + 1).long().tolist()
    return [[tags[i] for i in (rng.uniform(length) * len(tags)).long().tolist()] for length in lengths]


@pytest.mark.filterwarnings("ignore")
def test_spans_and_rates_are_seqeval_s():
    metrics = pytest.importorskip("seqeval.metrics")
    gold = random_tags(Rng(0), 400)
    others = [[*tags, *["O"] * 12][: len(x)] for tags, x in zip(random_tags(Rng(2), 400), gold, strict=True)]
    predicted = [
        [a if u < 0.6 else b for a, b, u in zip(x, y, Rng(1).uniform(len(x)).tolist(), strict=True)]
        for x, y in zip(gold, others, strict=True)
    ]
    for tags in gold:
        assert [tuple(span) for span in spans_of(tags)] == metrics.sequence_labeling.get_entities(tags)
    found = rates(count(gold, predicted))
    assert found[F1] == pytest.approx(100 * metrics.f1_score(gold, predicted), abs=1e-10)
    assert found["precision %"] == pytest.approx(100 * metrics.precision_score(gold, predicted), abs=1e-10)
    assert found["recall %"] == pytest.approx(100 * metrics.recall_score(gold, predicted), abs=1e-10)
    assert found[ACCURACY] == pytest.approx(100 * metrics.accuracy_score(gold, predicted), abs=1e-10)


def test_a_scheme_marks_the_same_spans():
    for tags in random_tags(Rng(3), 200):
        for scheme in ("bio", "bioes"):
            assert spans_of(in_scheme(tags, scheme)) == spans_of(tags)
    assert not has_spans(["DET"])
    with pytest.raises(UserError, match="marks no span"):
        in_scheme(["DET"], "bio")


@pytest.mark.statistical
def test_intervals_hold_the_truth_as_often_as_they_say():
    """200 intervals at 95 %: fewer than 178 hold the truth with probability 2e-4 or less at 95 % and 1e-6 at 96 %.

    Mutant: an interval of half the width holds it about 67 % of the time.
    """
    hits = narrow = 0
    for trial in range(200):
        right = Rng(trial).uniform(300, 5).numpy() < 0.8
        gold = [["A"] * 5] * 300
        found = intervals(count(gold, [["A" if r else "B" for r in row] for row in right]), Rng(trial))[ACCURACY]
        middle, reach = (found.low + found.high) / 2, (found.high - found.low) / 2
        hits += abs(80 - middle) <= reach
        narrow += abs(80 - middle) <= reach / 2
    assert binom.cdf(177, 200, 0.95) < 2e-4
    assert hits >= 178
    assert narrow < 178


def test_differences_are_paired():
    """A tagger that is right where the other is right, and one word more in each sentence, is surely better."""
    rng = Rng(5)
    gold = [["A"] * 6 for _ in range(100)]
    worse = [["A" if u < 0.5 else "B" for u in rng.uniform(6).tolist()] for _ in range(100)]
    better = [["A", *tags[1:]] for tags in worse]
    found = differences([count(gold, better)], [count(gold, worse)], Rng(0))
    assert found[ACCURACY].low > 0
    assert found[f"p {ACCURACY}"].value < 0.01
    same = differences([count(gold, worse)], [count(gold, worse)], Rng(0))
    assert same[ACCURACY].value == same[ACCURACY].low == 0
    assert same[f"p {ACCURACY}"].value == 1
    with pytest.raises(UserError, match="same sentences"):
        differences([count(gold, better)], [count(gold[:9], worse[:9])], Rng(0))
    assert confusions([["A", "A"]], [["B", "B"]]) == [("A", "B", 2)]
    assert np.isclose(rates(count([["O"]], [["O"]]))[ACCURACY], 100)
