"""The ladder compares each rung with the one below on the same windows, and says which rungs paid."""

import math

import numpy as np
import pytest

from freenergy import Rng
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.ladder import ladder, paid, verdict
from freenergy.evaluation.perplexity import Counts

W = 60


@pytest.fixture
def rungs():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 20, W).astype(float)
    counts = Counts(tokens, tokens / 2, 4 * tokens, np.arange(W) // 2)
    base = -(4 + rng.normal(0, 0.5, W)) * tokens
    local = base + (0.3 + rng.normal(0, 0.2, W)) * tokens
    energy = local + rng.normal(0, 0.05, W) * tokens
    return {"base": base, "local": local, "energy": energy}, counts


def test_every_rung_is_compared_with_the_one_below_and_with_the_base(rungs):
    log_p, counts = rungs
    rows = ladder(log_p, counts, Rng(0))
    assert [row["name"] for row in rows] == ["base", "local", "energy"]
    assert [row["kind"] for row in rows] == ["exact", "exact", "certified"]
    assert (rows[0]["over_below"], rows[0]["over_base"]) == (None, None)
    for row, below in zip(rows[1:], ["base", "local"], strict=True):
        assert row["perplexity"] == pytest.approx(math.exp(-log_p[row["name"]].sum() / counts.token.sum()))
        for key, other in (("over_below", below), ("over_base", "base")):
            percent = 100 * (1 - row["perplexity"] / math.exp(-log_p[other].sum() / counts.token.sum()))
            assert row[key]["percent"] == pytest.approx(percent)
    wanted = paired_bootstrap(
        log_p["local"], log_p["base"], counts.token, counts.documents, Rng(0).child("local", "over_below")
    )
    assert rows[1]["over_below"]["interval"] == wanted.interval


def test_the_verdict_names_what_paid_what_did_not_and_what_lost(rungs):
    log_p, counts = rungs
    worse = log_p | {"energy": log_p["local"] - 0.2 * counts.token}
    rows = ladder(log_p, counts, Rng(0))
    assert [paid(row) for row in rows] == [None, True, None]
    assert verdict(rows).startswith("Paid: local took 2")
    assert "Not shown to pay: energy took" in verdict(rows)
    assert "Made it worse: energy took −2" in verdict(ladder(worse, counts, Rng(0)))
    assert verdict(rows[:1]) == ""


def test_one_document_shows_nothing(rungs):
    log_p, counts = rungs
    alone = Counts(counts.token, counts.word, counts.byte, np.zeros(W, dtype=int))
    rows = ladder(log_p, alone, Rng(0))
    assert [paid(row) for row in rows] == [None, None, None]
    assert "too little text" in verdict(rows)
