"""How good tags are, and how sure we are of it.

    accuracy = Σ_s right_s / Σ_s words_s,      F1 = 2 Σ_s correct_s / (Σ_s found_s + Σ_s true_s)      s: sentences

Both are ratios of sums over sentences, so one bootstrap over sentences gives the interval of either, of precision and
recall, and of the difference of two taggers on the same sentences (paired). Rates are in percent. The p-value of a
difference is that of a permutation test: in each resample the two taggers exchange a random half of the sentences.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import FEWEST, ends_of
from freenergy.evaluation.perplexity import Measurement
from freenergy.tagging.spans import has_spans, spans_of

_RESAMPLES, _BATCH_SIZE = 2_000, 2_000_000
Tags = Sequence[Sequence[str]]  # of each sentence
ACCURACY, F1, PRECISION, RECALL = "accuracy %", "F1 %", "precision %", "recall %"


class SentenceCounts(NamedTuple):
    """What the rates are made of, for each of S sentences."""

    words: Float[np.ndarray, " S"]
    right: Float[np.ndarray, " S"]
    true: Float[np.ndarray, " S"]  # spans
    found: Float[np.ndarray, " S"]
    correct: Float[np.ndarray, " S"]

    @property
    def has_spans(self) -> bool:
        """Returns whether any sentence has a span."""
        return bool(self.true.sum() + self.found.sum())


def count(gold: Tags, predicted: Tags) -> SentenceCounts:
    """Returns the counts of predicted tags; spans are counted where the true tags are of a scheme of spans."""
    if len(gold) != len(predicted) or any(len(a) != len(b) for a, b in zip(gold, predicted, strict=False)):
        raise UserError("true and predicted tags are of different lengths: give one tag for each word of each sentence")
    in_spans = has_spans(tag for tags in gold for tag in tags)
    rows = []
    for own, other in zip(gold, predicted, strict=True):
        right = sum(a == b for a, b in zip(own, other, strict=True))
        a, b = (set(spans_of(own)), set(spans_of(other))) if in_spans else (set(), set())
        rows.append((len(own), right, len(a), len(b), len(a & b)))
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    return SentenceCounts(*table.T)


def _parts(counts: SentenceCounts) -> dict[str, tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]]:
    """Returns what is divided by what."""
    found = {ACCURACY: (counts.right, counts.words)}
    if counts.has_spans:
        found = {F1: (2 * counts.correct, counts.found + counts.true), **found}
        found |= {PRECISION: (counts.correct, counts.found), RECALL: (counts.correct, counts.true)}
    return found


def rates(counts: SentenceCounts) -> dict[str, float]:
    """Returns accuracy and, where there are spans, F1, precision and recall, in percent; 0 of 0 is 0.

    >>> rates(count([["B-A", "I-A", "O"]], [["B-A", "O", "O"]]))
    {'F1 %': 0.0, 'accuracy %': 66.66666666666667, 'precision %': 0.0, 'recall %': 0.0}
    """
    return {name: _percent(a.sum(), b.sum()) for name, (a, b) in _parts(counts).items()}


def intervals(counts: SentenceCounts, rng: Rng) -> dict[str, Measurement]:
    """Returns the same with 95 % intervals over sentences."""
    sums = {name: _resampled(parts, rng.child(name)) for name, parts in _parts(counts).items()}
    return {name: _measured(value, sums[name], len(counts.words)) for name, value in rates(counts).items()}


def differences(ours: Sequence[SentenceCounts], others: Sequence[SentenceCounts], rng: Rng) -> dict[str, Measurement]:
    """Returns ours − others in percent points, paired over sentences, means over seeds; and p of the main rate.

    Element i of both lists is of the same seed, all of the same sentences.
    """
    if len(ours) != len(others) or not ours or any(len(each.words) != len(ours[0].words) for each in [*ours, *others]):
        raise UserError("taggers are compared on the same sentences and the same seeds: measure both alike")
    S, found = len(ours[0].words), dict[str, Measurement]()
    a, b = ([_parts(each) for each in side] for side in (ours, others))
    names = [name for name in a[0] if all(name in each for each in [*a, *b])]
    for name in names:
        pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True)]
        value = float(np.mean([_percent(x[0].sum(), x[1].sum()) - _percent(y[0].sum(), y[1].sum()) for x, y in pairs]))
        own = rng.child(name)  # both sides of every seed draw the same sentences
        drawn = np.mean([_resampled(x, own) - _resampled(y, own) for x, y in pairs], axis=0)
        found[name] = _measured(value, drawn, S)
    found[f"p {names[0]}"] = Measurement(
        _p_value([(x[names[0]], y[names[0]]) for x, y in zip(a, b, strict=True)], rng), None, None
    )
    return found


def _measured(value: float, drawn: Float[np.ndarray, " R"], sentences: int) -> Measurement:
    if sentences < FEWEST:
        return Measurement(value, None, None)
    low, high = np.quantile(drawn, ends_of(sentences)).tolist()
    return Measurement(value, low, high)


def _percent(a: float, b: float) -> float:
    return 100 * float(a) / float(b) if b else 0.0


def _resampled(parts: tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]], rng: Rng) -> Float[np.ndarray, " R"]:
    """Returns the rate of each resample of sentences; the same stream draws the same sentences."""
    a, b = parts
    S, found, stream = len(a), list[np.ndarray](), rng.child("resample")
    size = max(1, _BATCH_SIZE // S)
    for first in range(0, _RESAMPLES, size):
        chosen = (stream.uniform(min(size, _RESAMPLES - first), S).numpy() * S).astype(np.int64)
        found.append(100 * a[chosen].sum(1) / np.maximum(b[chosen].sum(1), 1))
    return np.concatenate(found)


Pair = tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]


def _p_value(pairs: Sequence[tuple[Pair, Pair]], rng: Rng) -> float:
    """Returns the two-sided p-value of the permutation test: how often exchanging sentences does as much."""
    S, stream = len(pairs[0][0][0]), rng.child("exchange")

    def gap(swap: Float[np.ndarray, "R S"]) -> Float[np.ndarray, " R"]:
        each = []
        for (a, n), (b, m) in pairs:
            ours = 100 * (a.sum() - swap @ (a - b)) / np.maximum(n.sum() - swap @ (n - m), 1)
            each.append(ours - 100 * (b.sum() + swap @ (a - b)) / np.maximum(m.sum() + swap @ (n - m), 1))
        return np.asarray(np.mean(each, axis=0))

    seen = abs(gap(np.zeros((1, S)))[0])
    size, at_least = max(1, _BATCH_SIZE // S), 0
    for first in range(0, _RESAMPLES, size):
        swap = (stream.uniform(min(size, _RESAMPLES - first), S).numpy() < 0.5).astype(np.float64)
        at_least += int((np.abs(gap(swap)) >= seen - 1e-12).sum())
    return (at_least + 1) / (_RESAMPLES + 1)


def confusions(gold: Tags, predicted: Tags, most: int = 20) -> list[tuple[str, str, int]]:
    """Returns the commonest confusions: the true tag, the predicted one, how often."""
    wrong = Counter(
        (a, b) for own, other in zip(gold, predicted, strict=True) for a, b in zip(own, other, strict=True) if a != b
    )
    return [(a, b, n) for (a, b), n in sorted(wrong.items(), key=lambda item: (-item[1], item[0]))[:most]]
