"""Features of n-grams against plain dictionaries, with and without a window's own places."""

import math
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import load_file, save_file

from freenergy import Continuations, NgramLM, Rng, Sequences, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.ngram_features import NgramEnergy, NgramFeatures
from freenergy.energies.ngram_tables import NgramTables
from freenergy.lm.ngram import discounts
from freenergy.lm.ngram_counts import count
from freenergy.testing import check_energy

V, EOS = 6, 0
LEXICON = 4
SETTINGS = NgramEnergy(order=3, skips=(1, 2), lexicon=LEXICON)


def text(seed=0, length=400):
    rng = np.random.default_rng(seed)
    stream = rng.choice(V, size=length, p=[0.06, 0.4, 0.2, 0.14, 0.12, 0.08])
    stream[-1] = EOS
    return stream


def energy(stream=None, settings=SETTINGS):
    sizes = {"order": settings.order, "skips": settings.skips}
    return NgramFeatures(
        settings, NgramTables.fit(text() if stream is None else stream, vocab_size=V, eos=EOS, **sizes)
    )


def histories(tokens, at, start_known):
    """Usable history of a place, nearest last: back to EOS or to where the string begins."""
    before = []
    for token in reversed(tokens[:at]):
        before.insert(0, int(token))
        if token == EOS:
            return before
    return [EOS, *before] if start_known else before


class Slow:
    """Counts in dictionaries, of all places of a stream but the left-out ones."""

    def __init__(self, stream, order, skips, without=()):
        self.order, self.skips = order, skips
        counts, _ = count(stream, vocab_size=V, eos=EOS, order=order)
        self.D = [discounts(level.counts) for level in counts.levels]
        self.lexicon = sorted(range(V), key=lambda v: (-np.count_nonzero(stream == v), v))[:LEXICON]
        self.c, self.pairs = Counter(), Counter()
        for t, token in enumerate(stream):
            if t in without:
                continue
            h = histories(stream, t, True)
            for k in range(1, order + 1):
                if len(h) >= k - 1:
                    self.c[(*h[len(h) - k + 1 :], int(token))] += 1
            for s in skips:
                if len(h) >= s + 1:
                    self.pairs[s, h[-s - 1], int(token)] += 1

    def a(self, gram):
        if len(gram) == self.order or (gram[0] == EOS and len(gram) > 1):
            return self.c[gram]
        return sum(1 for v in range(V) if self.c[(v, *gram)] > 0)

    def p(self, w, h):
        lower = self.p(w, h[1:]) if h else 1 / V
        D, a = self.D[len(h)], {v: self.a((*h, v)) for v in range(V)}
        total = sum(a.values())
        if not total:
            return lower
        return (a[w] - D[min(a[w], 3)] + sum(D[min(n, 3)] for n in a.values()) * lower) / total

    def features(self, context, x):
        known, blocks = [*(context or [EOS]), *x], []
        at = range(len(known) - len(x), len(known))
        for k in range(1, self.order + 1):
            found, shares, log_p = [], [], []
            for t in at:
                h = histories(known, t, False)
                log_p.append(math.log(self.p(known[t], tuple(h[-k + 1 :]) if k > 1 else ())))
                if len(h) >= k - 1:
                    h = tuple(h[len(h) - k + 1 :])
                    found.append(self.c[(*h, known[t])])
                    shares.append(math.log((found[-1] + 0.1) / (sum(self.c[(*h, v)] for v in range(V)) + 1)))
            blocks += [*buckets(found), sum(map(math.log1p, found)), *([sum(shares)] if k > 1 else [])]
            blocks += [sum(log_p), min(log_p, default=0.0)]
        for s in self.skips:
            heads = [(histories(known, t, False), known[t]) for t in at]
            found = [self.pairs[s, h[-s - 1], token] for h, token in heads if len(h) >= s + 1]
            blocks += [*buckets(found), sum(map(math.log1p, found))]
        blocks += [*repeats(list(context), list(x)), len(set(x)) / max(len(x), 1), len(x)]
        return [*blocks, *(list(x).count(v) for v in self.lexicon)]


def buckets(found):
    bounds = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 256), (257, math.inf)]
    return [sum(low <= c <= high for c in found) for low, high in bounds]


def repeats(context, x):
    whole, start = context + x, len(context)
    for n in range(1, 5):
        grams = {t: tuple(whole[t - n + 1 : t + 1]) for t in range(n - 1, len(whole))}
        mine = [t for t in grams if t >= start]
        yield sum(any(grams[u] == grams[t] for u in grams if u < start) for t in mine)
        yield sum(any(grams[u] == grams[t] for u in mine if u < t) for t in mine)


CASES = [
    ([1, 2, 3, 1, 1], [[1, 2, 3, 1], [4, 4, 4, 4], [5], [2, 1, 0]]),
    ([], [[1, 1, 2, 2], [0], [3, 0, 1, 1], []]),
    ([2], [[1, 3, 1, 3], [5, 5], [1, 2, 1], [0, 0, 1, 2]]),
    ([3, 0, 1], [[1, 1, 1, 1], [2, 4], [5, 1, 2, 5], [1, 0]]),
]


def test_features_are_those_of_plain_dictionaries():
    found = energy().features(Continuations.from_lists([c for c, _ in CASES], [xs for _, xs in CASES]))
    reference = Slow(text(), 3, (1, 2))
    wanted = torch.tensor([[reference.features(c, x) for x in xs] for c, xs in CASES], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    assert found.shape[-1] == len(energy().names) == len(set(energy().names))


def own_windows(stream, prefix, length):
    """Windows of the text that stay inside a document, as a corpus cuts them."""
    bounds = [-1, *np.flatnonzero(stream == EOS)]
    for start, end in pairwise(bounds):
        for first in range(start + 1, end + 1 - prefix, length):
            yield first + prefix, min(length, end + 1 - first - prefix)


@pytest.mark.parametrize("seed", range(3))
def test_own_places_are_left_out_exactly(seed):
    """As if the n-grams that end in the window's continuation had never been counted."""
    stream = text(seed, 150)
    windows = list(own_windows(stream, 4, 6))
    assert len(windows) > 3
    contexts = [stream[start - 4 : start].tolist() for start, _ in windows]
    xs = [[stream[start : start + n].tolist()] for start, n in windows]
    found = energy(stream).features(Continuations.from_lists(contexts, xs), leave_self_out=True)
    for b, (start, n) in enumerate(windows):
        reference = Slow(stream, 3, (1, 2), without=range(start, start + n))
        wanted = torch.tensor(reference.features(contexts[b], xs[b][0]), dtype=torch.float64)
        torch.testing.assert_close(found[b, 0], wanted, atol=1e-9, rtol=0)
    kept = energy(stream).features(Continuations.from_lists(contexts, xs))
    assert (kept - found).abs().max() > 1  # the own places do matter


def test_own_places_at_the_start_of_a_document():
    """n-grams that begin a document keep their plain counts in Kneser-Ney; an empty context is such a start."""
    stream = np.array([1, 2, 1, 0, 1, 2, 3, 0, 1, 1, 0, 2, 1, 0])
    found = energy(stream).features(
        Continuations.from_lists([[], []], [[[1, 2, 3, 0]], [[2, 1, 0]]]), leave_self_out=True
    )
    for b, (x, places) in enumerate([([1, 2, 3, 0], range(4, 8)), ([2, 1, 0], range(11, 14))]):
        wanted = torch.tensor(Slow(stream, 3, (1, 2), without=places).features([], x), dtype=torch.float64)
        torch.testing.assert_close(found[b, 0], wanted, atol=1e-10, rtol=0)


def test_what_a_window_says_twice_and_nobody_else_is_left_out():
    """An n-gram is gone when all its occurrences are the window's own, not only when there was one."""
    stream = np.array([1, 2, 1, 0, 1, 1, 5, 4, 5, 4, 5, 0, 2, 1, 0])
    found = energy(stream).features(Continuations.from_lists([[1, 1]], [[[5, 4, 5, 4, 5]]]), leave_self_out=True)
    reference = Slow(stream, 3, (1, 2), without=range(6, 11))
    wanted = torch.tensor(reference.features([1, 1], [5, 4, 5, 4, 5]), dtype=torch.float64)
    torch.testing.assert_close(found[0, 0], wanted, atol=1e-10, rtol=0)


def test_the_log_probability_is_that_of_the_language_model():
    x = Continuations.from_lists([c for c, _ in CASES], [xs for _, xs in CASES])
    E = energy()
    column = E.features(x)[..., E.names.index("3-gram: Σ log p")]
    lm = NgramLM.fit(text(), vocab_size=V, eos=EOS, order=3)
    torch.testing.assert_close(column, lm.log_prob(x), atol=1e-12, rtol=0)


def test_counting_in_blocks_changes_nothing(monkeypatch):
    from freenergy.energies import ngram_tables

    whole = energy().tables
    monkeypatch.setattr(ngram_tables, "_BLOCK", 7)
    parts = energy().tables
    for one, other in zip(whole.raw, parts.raw, strict=True):
        np.testing.assert_array_equal(one, other)
    for skip in whole.pairs:
        for one, other in zip(whole.pairs[skip], parts.pairs[skip], strict=True):
            np.testing.assert_array_equal(one, other)


def test_it_is_an_energy_and_starts_at_zero():
    x = Continuations.from_lists([c for c, _ in CASES], [xs for _, xs in CASES])
    E = energy()
    assert (E(x) == 0).all()
    assert E(x).dtype == torch.float64
    with torch.no_grad():
        E.weight.copy_(Rng(1).normal(len(E.names)))
        E.fit_scale([E.features(x)])
    assert E(x).std() > 0.1
    check_energy(E, x, tolerance=1e-10)


def test_constant_features_and_odd_values_are_tame():
    x = Continuations.from_lists([c for c, _ in CASES], [xs for _, xs in CASES])
    E = energy()
    features = E.features(x)
    features[..., 5] = 3.25
    E.fit_scale([features])
    assert E.scale[5] == 1
    assert E.standardised(features)[..., 5].abs().max() == 0
    z = E.standardised(features).flatten(0, 1)
    torch.testing.assert_close(z.mean(0), torch.zeros_like(z[0]), atol=1e-9, rtol=0)
    features[0, 0, 1] = 1e12
    assert E.standardised(features).max() == 10


def tokenizer():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    return Tokenizer(inner, EOS)


def test_saved_and_loaded_it_has_the_same_bits(tmp_path):
    x = Continuations.from_lists([c for c, _ in CASES], [xs for _, xs in CASES])
    E, base = energy(settings=NgramEnergy(order=2, skips=(2, 1))), TabularLM.random(Rng(0), vocab_size=V, order=1)
    with torch.no_grad():
        E.weight.copy_(Rng(1).normal(len(E.names)))
        E.bias.fill_(0.5)
        E.fit_scale([E.features(x)])
    E.save_pretrained(tmp_path / "energy")
    again = NgramFeatures.from_pretrained(tmp_path / "energy", base=base, tokenizer=tokenizer())
    assert torch.equal(again(x), E(x))
    assert again.settings == E.settings
    other = TabularLM.random(Rng(0), vocab_size=V + 1, order=1)
    with pytest.raises(UserError, match="the base that it was trained with"):
        NgramFeatures.from_pretrained(tmp_path / "energy", base=other, tokenizer=tokenizer())
    (tmp_path / "energy" / "tables.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="train the energy again"):
        NgramFeatures.from_pretrained(tmp_path / "energy", base=base, tokenizer=tokenizer())


def test_what_cannot_be_is_said():
    with pytest.raises(UserError, match="count again"):
        NgramFeatures(NgramEnergy(order=4), energy().tables)
    with pytest.raises(UserError, match="token id 6"):
        energy()(Continuations.from_lists([[1]], [[[V]]]))


def test_ten_thousand_continuations_take_seconds():
    rng = np.random.default_rng(0)
    stream = rng.zipf(1.3, 200_000) % 5000
    stream[-1] = EOS
    E = NgramFeatures(NgramEnergy(), NgramTables.fit(stream, vocab_size=5000, eos=EOS))
    contexts = torch.from_numpy(rng.zipf(1.3, (500, 120)) % 5000)
    x = torch.from_numpy(rng.zipf(1.3, (500, 20, 40)) % 5000)
    begun = time.process_time()
    E.features(Continuations(Sequences(contexts, torch.full((500,), 120)), x, torch.full((500, 20), 40)))
    assert time.process_time() - begun < 15


@pytest.mark.parametrize("name", ["keys.2", "raw.1", "counts.3", "pairs.1.keys", "pairs.2.counts"])
@pytest.mark.parametrize("harm", ["two dimensions", "another length", "numbers with a point"])
def test_tables_whose_arrays_do_not_fit_are_refused(tmp_path, name, harm):
    path = tmp_path / "tables.safetensors"
    energy().tables.save(path)
    arrays = load_file(path)
    change = {
        "two dimensions": lambda a: a[None],
        "another length": lambda a: a[1:],
        "numbers with a point": lambda a: a.astype(np.float64),
    }
    save_file(arrays | {name: np.ascontiguousarray(change[harm](arrays[name]))}, path)
    with pytest.raises(UserError, match=r"is damaged or of another version .*train the energy again"):
        NgramTables.load(path)
