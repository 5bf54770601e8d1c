"""Statistics of text against plain counting, and the interval of distinct n-grams against repeated sampling."""

import math

import numpy as np
import pytest

from freenergy import Continuations
from freenergy.core.progress import Silent
from freenergy.corpus.deduplicate import Stream
from freenergy.evaluation.perplexity import Measurement
from freenergy.evaluation.text_statistics import (
    CountedText,
    Share,
    distinct,
    nearer,
    nearer_to_human,
    repetition,
    shares_of_text,
    text_statistics,
    unseen,
)


def make(rows, contexts=None, documents=None):
    """A text from windows with one or more versions each."""
    x = Continuations.from_lists(contexts or [[1]] * len(rows), rows)
    return CountedText(x, np.arange(len(rows)) if documents is None else np.array(documents))


def stream(tokens, bounds=None):
    tokens = np.array(tokens)
    return Stream(
        read=lambda a, b: tokens[a:b], size=len(tokens), documents=np.array(bounds if bounds else [0, len(tokens)])
    )


def random_text(seed, W=12, R=2, L=7, V=4):
    rng = np.random.default_rng(seed)
    rows = [[rng.integers(0, V, rng.integers(1, L + 1)).tolist() for _ in range(R)] for _ in range(W)]
    contexts = [rng.integers(0, V, 5).tolist() for _ in range(W)]
    return make(rows, contexts, rng.integers(0, 5, W).tolist())


def grams(row, n):
    return [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_distinct_is_plain_counting(n):
    text = random_text(n)
    budget, shares = 20, []
    for r in range(2):
        found, left = [], budget
        for row in text.x.lists():
            found += grams(row[r][: max(left, 0)], n)
            left -= len(row[r])
        shares.append((len(set(found)), len(found)))
    K, T = np.sum(shares, axis=0)
    assert distinct(text, n, budget).value == pytest.approx(K / T)
    assert distinct(text, n, 10**6).value < 1


def test_equal_numbers_of_tokens_are_compared():
    long, short = make([[[1, 2, 1, 2, 1, 2]]] * 3), make([[[1, 2]]] * 3)
    texts = {"human": long, "base": short}
    found = text_statistics(texts, shares_of_text(texts, stream([1, 2, 0]), Silent()))
    assert found["human"]["tokens"] == found["base"]["tokens"] == 6
    assert found["human"]["distinct"]["2"][0] == pytest.approx(2 / 5)  # one whole window and nothing of the others
    assert found["base"]["distinct"]["2"][0] == pytest.approx(1 / 3)


def test_repetition_by_hand():
    text = make([[[1, 2, 3, 4, 9]]], contexts=[[1, 2, 3, 4]])
    # 4-grams that end in the continuation: 2341 3412 4123 1234 2349; only 1234 stood before
    assert repetition(text).value == pytest.approx(1 / 5)


@pytest.mark.parametrize("n", [2, 4])
def test_repetition_is_plain_counting(n):
    text = random_text(7, V=2)
    before = total = 0
    for context, rows in zip(text.x.contexts.lists(), text.x.lists(), strict=True):
        for row in rows:
            every = grams(context + row, n)
            for i, gram in enumerate(every):
                if i + n > len(context):
                    total += 1
                    before += gram in every[:i]
    assert repetition(text, n).value == pytest.approx(before / total)
    assert 0 < before < total


@pytest.mark.parametrize("n", [2, 3, 4])
def test_unseen_is_plain_counting(n):
    text, train = random_text(n + 10, V=5), np.random.default_rng(5).integers(0, 5, 60).tolist()
    documents = [0, 25, 60]  # no n-gram goes from one document into the next
    known = {gram for a, b in ((0, 25), (25, 60)) for gram in grams(train[a:b], n)}
    every = [gram for rows in text.x.lists() for row in rows for gram in grams(row, n)]
    share = np.mean([gram not in known for gram in every])
    found = unseen(text, n, stream(train, documents), lambda amount, note="": None)
    assert found.value == pytest.approx(share)
    assert 0 < share < 1


def test_what_has_no_ngrams_has_no_share():
    text = make([[[1, 2]], [[3]]])
    assert distinct(text, 4, 3).measured() == Measurement(None, None, None)
    assert unseen(text, 4, stream([1, 2, 0]), lambda amount, note="": None).value is None


@pytest.mark.statistical
def test_the_interval_of_distinct_covers():
    """60 documents of Zipf's words with habits of their own: the mean of K/T over 400 such texts is in the interval.

    At least 95 % − 5 standard errors of 400 repeats (false-failure rate 3e-7), and not wider than twice the spread.
    The mutant, a bootstrap over documents, is nearly always below.
    """
    V, D = 60, 60
    zipf = 1 / np.arange(1, V + 1)

    def sample(seed):
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(D):
            own = zipf * np.exp(rng.normal(0, 1.0, V))
            rows.append([rng.choice(V, 12, p=own / own.sum()).tolist()])
        return make(rows)

    def share(rows):
        every = [gram for [row] in rows for gram in grams(row, 2)]
        return len(set(every)) / len(every)

    texts = [sample(seed) for seed in range(400)]
    values = np.array([share(text.x.lists()) for text in texts])
    truth = values.mean()
    found = [distinct(text, 2, 10**6).measured() for text in texts]
    assert found[3].value == pytest.approx(values[3])
    covers = np.mean([m.low <= truth <= m.high for m in found])
    assert covers > 0.95 - 5 * math.sqrt(0.95 * 0.05 / 400)
    assert np.median([m.high - m.low for m in found]) < 2 * 2 * 1.96 * values.std()
    rng, rows = np.random.default_rng(0), texts[0].x.lists()
    resampled = [share([rows[i] for i in rng.integers(0, D, D)]) for _ in range(200)]
    assert np.quantile(resampled, 0.975) < truth


def test_versions_are_counted_apart():
    """A text that is the same twice is no less distinct for it."""
    rows = [[row[0], row[0]] for row in random_text(3).x.lists()]
    once, twice = make([[row[0]] for row in rows]), make(rows)
    assert distinct(once, 2, 10**6).value == pytest.approx(distinct(twice, 2, 10**6).value)


def test_nearer_is_the_difference_of_the_distances_to_human_text():
    human, model, base = (make([[row] for row in rows]) for rows in ([[1, 2, 3]] * 8, [[1, 2, 2]] * 8, [[2, 2, 2]] * 8))
    shares = shares_of_text({"human": human, "base": base, "joint": model}, stream([1, 2, 3, 0]), Silent())
    found = nearer_to_human(shares, "joint")
    of = {name: {key: share.value for key, share in each.items()} for name, each in shares.items()}
    for key in ("distinct 2", "unseen 2"):
        wanted = abs(of["base"][key] - of["human"][key]) - abs(of["joint"][key] - of["human"][key])
        assert found[key][0] == pytest.approx(wanted)
    assert found["unseen 2"] == pytest.approx([0.5, 0.5, 0.5])  # all documents are alike
    assert nearer_to_human(shares, "base")["unseen 2"][0] == 0


@pytest.mark.statistical
def test_the_interval_of_nearer_covers():
    """Shares of 40 documents that go together: of 300 intervals fewer than 255 hold the truth at a rate below 1e-10.

    The mutant that takes the three texts for independent is wider by a factor of two.
    """
    truth, held, widths, apart = abs(0.7 - 0.4) - abs(0.5 - 0.4), 0, [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        common, size = rng.normal(0, 0.15, 40), np.full(40, 20.0)
        human, base, model = (
            Share.of(size * (mean + common + rng.normal(0, 0.02, 40)), size) for mean in (0.4, 0.7, 0.5)
        )
        found = nearer(base, model, human)
        held += found.low <= truth <= found.high
        widths.append(found.high - found.low)
        apart.append(math.hypot(*(share.measured().high - share.value for share in (human, base, model))) * 2)
    assert held >= 255
    assert np.median(apart) > 2 * np.median(widths)
