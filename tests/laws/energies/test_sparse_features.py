"""Discrete features against a reading of Table 3.2 in plain loops; their tables, classes and single-site changes."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from freenergy import UserError
from freenergy.core.sentences import Sentences
from freenergy.energies.sparse.classes import _Exchange, word_classes
from freenergy.energies.sparse.features import SparseFeatures, SparseSettings
from freenergy.energies.sparse.key_table import KeyTable
from freenergy.energies.sparse.patterns import TYPES

V, EOS = 7, 0


@pytest.fixture
def text():
    generator = np.random.default_rng(3)
    rows = [[*generator.integers(1, V, size=n).tolist(), EOS] for n in generator.integers(1, 14, size=60)]
    return Sentences.from_lists(rows)


def patterns_by_hand(row, classes, boundary):
    """Every pattern of a sentence as a tuple of its type, its symbols and what stands there."""
    full = [EOS, *row]
    found = []
    for at in range(1, len(full)):
        if boundary == "none" and at == len(full) - 1:
            continue
        for name, patterns in TYPES.items():
            for pattern in patterns:
                for offsets in pattern.offsets:
                    first = at - offsets[0]
                    if first < (1 if boundary == "none" else 0):
                        continue
                    seen = [full[at - o] if s == "w" else int(classes[full[at - o]])
                            for s, o in zip(pattern.symbols, offsets, strict=True)]  # fmt: skip
                    found.append((name, pattern.symbols, pattern.offsets, tuple(seen)))
    return [*found, ("len", len(row) - 1)]


@pytest.mark.parametrize("boundary", ["both", "none"])
def test_the_matrix_counts_every_pattern_of_the_table(text, boundary):
    settings = SparseSettings(types=tuple(TYPES), cutoff=2, classes=3, boundary=boundary)
    features = SparseFeatures.fit(text, settings, vocab_size=V, eos=EOS)
    rows = [patterns_by_hand(row, features.classes, boundary) for row in text.lists()]
    counts = Counter(pattern for row in rows for pattern in row)
    assert features.num == sum(count >= 2 for count in counts.values())
    kept = [sum(counts[pattern] >= 2 for pattern in row) for row in rows]
    assert features.matrix(text).sum(1).ravel().tolist() == [kept]
    # the columns have the right totals, not only the rows
    totals = np.asarray(features.matrix(text).sum(0)).ravel()
    assert sorted(totals) == sorted(count for count in counts.values() if count >= 2)


def test_potentials_are_the_matrix_times_the_weights_and_change_at_one_site(text):
    features = SparseFeatures.fit(text, SparseSettings(types=tuple(TYPES), cutoff=1, classes=3), vocab_size=V, eos=EOS)
    weights = np.random.default_rng(0).normal(size=features.num)
    assert features.potential(text, weights) == pytest.approx(features.matrix(text) @ weights, abs=1e-12)
    row = max(text.lists(), key=len)
    for place in (0, 3, len(row) - 2):
        others = [[*row[:place], v, *row[place + 1 :]] for v in range(1, V)]
        whole = features.potential(Sentences.from_lists(others), weights)
        found = features.site_potentials(np.array(row), place, weights)
        assert found[EOS] == -np.inf
        assert np.diff(found[1:]) == pytest.approx(np.diff(whole), abs=1e-12)


def test_a_text_shorter_than_a_pattern_has_what_it_has(text):
    features = SparseFeatures.fit(text, SparseSettings(types=tuple(TYPES), cutoff=1, classes=3), vocab_size=V, eos=EOS)
    short, weights = text.rows(text.lengths == 1).take(0, 1), np.random.default_rng(0).normal(size=features.num)
    among = features.potential(text, weights)[np.flatnonzero(text.lengths == 1)[0]]
    assert features.potential(short, weights) == pytest.approx([among], abs=1e-12)


def test_inside_words_only_a_site_changes_what_the_whole_says(text):
    settings = SparseSettings(types=("w", "tied"), cutoff=1, boundary="none")
    features = SparseFeatures.fit(text, settings, vocab_size=V, eos=EOS)
    weights, row = np.random.default_rng(1).normal(size=features.num), max(text.lists(), key=len)
    others = [[*row[:1], v, *row[2:]] for v in range(1, V)]
    whole = features.potential(Sentences.from_lists(others), weights)
    assert np.diff(features.site_potentials(np.array(row), 1, weights)[1:]) == pytest.approx(np.diff(whole), abs=1e-12)


def test_features_come_back_from_their_arrays(text):
    settings = SparseSettings(types=("w", "c", "len"), cutoff=2, classes=4)
    features = SparseFeatures.fit(text, settings, vocab_size=V, eos=EOS)
    again = SparseFeatures.from_arrays(features.arrays(), settings, eos=EOS)
    assert (again.matrix(text) != features.matrix(text)).nnz == 0
    assert again.fingerprint == features.fingerprint


def test_a_key_table_finds_what_a_dictionary_finds():
    generator = np.random.default_rng(5)
    keys = np.unique(generator.integers(0, 10**15, size=3000))
    generator.shuffle(keys)
    table, by_hand = KeyTable(keys, first=4), {int(key): i + 4 for i, key in enumerate(keys)}
    asked = np.concatenate([keys, keys + 1, [-1]])
    assert table.find(asked).tolist() == [by_hand.get(int(key), -1) for key in asked]


def test_exchange_gains_are_differences_of_the_likelihood():
    generator = np.random.default_rng(2)
    stream = generator.integers(0, 6, size=400)
    classes = word_classes(stream, vocab_size=6, eos=0, num_classes=3, passes=0)
    text = np.concatenate([[0], stream])
    pairs = np.zeros((6, 6), dtype=np.int64)
    np.add.at(pairs, (text[:-1], text[1:]), 1)

    def likelihood(of):
        N = np.zeros((3, 3))
        for i, j in product(range(6), repeat=2):
            N[of[i], of[j]] += pairs[i, j]
        phi = lambda n: (n * np.log(np.maximum(n, 1))).sum()  # noqa: E731
        return phi(N) - phi(N.sum(0)) - phi(N.sum(1))

    from scipy.sparse import csr_matrix

    state = _Exchange(csr_matrix(pairs), classes.copy(), 3)
    assert state.likelihood() == pytest.approx(likelihood(classes), abs=1e-9)
    word, near = 4, state.neighbours(4)
    state.add(word, int(classes[word]), -1, near)
    gains = state.gains(near)
    by_hand = [likelihood(np.where(np.arange(6) == word, c, classes)) for c in range(3)]
    assert np.diff(gains) == pytest.approx(np.diff(by_hand), abs=1e-9)
    before = likelihood(classes)
    after = likelihood(word_classes(stream, vocab_size=6, eos=0, num_classes=3, passes=5))
    assert after > before


def test_classes_part_words_that_are_used_apart():
    """Words 1–3 are always followed by 4–6: two classes and that of EOS find exactly this."""
    generator = np.random.default_rng(0)
    stream = np.stack([generator.integers(1, 4, 300), generator.integers(4, 7, 300), np.zeros(300, int)], 1).ravel()
    classes = word_classes(stream, vocab_size=7, eos=0, num_classes=3, passes=10)
    assert classes[0] == 2
    assert len(set(classes[1:4].tolist())) == len(set(classes[4:7].tolist())) == 1
    assert classes[1] != classes[4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseSettings(types=("w", "nothing")), "choose from w, c"),
        (lambda: SparseSettings(cutoff=0), "cutoff"),
        (lambda: SparseSettings(cutoffs={"w": 0}), "a count of 1 or more"),
        (lambda: word_classes(np.array([1, 0]), vocab_size=2, eos=0, num_classes=3), "num_classes is 3"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_wrong_texts_are_refused(text):
    features = SparseFeatures.fit(text, SparseSettings(types=("w",)), vocab_size=V, eos=EOS)
    with pytest.raises(UserError, match="not below 7"):
        features.matrix(Sentences.from_lists([[7, 0]]))
    with pytest.raises(UserError, match="does not end with EOS"):
        features.matrix(Sentences.from_lists([[1, 2]]))
    with pytest.raises(UserError, match="is no word"):
        features.site_potentials(np.array([1, 0]), 1, np.zeros(features.num))
