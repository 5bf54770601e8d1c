import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freenergy.corpus import CorpusSettings, deduplicate
from freenergy.corpus.deduplicate import Stream, repeated, touched
from freenergy.corpus.windows import make_windows

EOS = 9

documents = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=5)


def tokens_of(rows):
    return np.array([token for row in rows for token in (*row, EOS)], dtype=np.uint16)


def stream(rows):
    tokens = tokens_of(rows)
    bounds = np.cumsum([0, *(len(row) + 1 for row in rows)])
    return Stream(read=lambda first, stop: tokens[first:stop], size=len(tokens), documents=bounds)


def ngrams(rows, n):
    return {tuple(row[i : i + n]) for row in ([*row, EOS] for row in rows) for i in range(len(row) - n + 1)}


@pytest.fixture(params=[1 << 20, 7], ids=["one chunk", "many chunks"], autouse=True)
def chunk(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deduplicate, "_CHUNK", request.param)
        yield


@given(documents, documents, documents, st.integers(1, 5))
def test_marks_are_those_of_a_set(held_out, first, second, n):
    marked, share = repeated(stream(held_out), [stream(first), stream(second)], n, lambda amount: None)
    known = ngrams(first, n) | ngrams(second, n)
    expected = []
    for row in ([*row, EOS] for row in held_out):
        expected += [i + n <= len(row) and tuple(row[i : i + n]) in known for i in range(len(row))]
    assert marked.tolist() == expected
    places = sum(max(len(row) + 2 - n, 0) for row in held_out)
    assert share == pytest.approx(sum(expected) / places if places else 0)


@given(documents, documents, st.integers(1, 5), st.integers(0, 3), st.integers(1, 4), st.sampled_from(["fixed", "eos"]))
def test_windows_touched_are_those_of_a_set(held_out, train, n, prefix, continuation, ending):
    settings = CorpusSettings(source="x", prefix=prefix, continuation=continuation, stride=1, ending=ending)
    held_out = [*held_out, [0] * 8]
    held, held_tokens = stream(held_out), tokens_of(held_out)
    (windows,) = make_windows(held.documents, settings, "test")
    marked, _ = repeated(held, [stream(train)], n, lambda amount: None)
    known = ngrams(train, n)
    expected = []
    for start, length in zip(windows["start"], windows["length"], strict=True):
        tokens = held_tokens[start : start + prefix + length].tolist()
        expected.append(any(tuple(tokens[i : i + n]) in known for i in range(len(tokens) - n + 1)))
    assert touched(marked, windows, prefix, n).tolist() == expected


def test_a_planted_overlap_is_found():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 8000, (3, 500)).tolist()
    held_out = rng.integers(0, 8000, (2, 500)).tolist()
    held_out[1][100:124] = train[2][300:324]
    marked, share = repeated(stream(held_out), [stream(train)], 24, lambda amount: None)
    assert np.flatnonzero(marked).tolist() == [501 + 100]
    assert share == pytest.approx(1 / (2 * (501 - 23)))
    settings = CorpusSettings(source="x", prefix=20, continuation=40)
    (windows,) = make_windows(stream(held_out).documents, settings, "test")
    dropped = touched(marked, windows, 20, 24)
    kept = windows["start"][dropped]
    assert kept.tolist() == [501 + 80]


def test_nothing_to_compare():
    marked, share = repeated(stream([[1]]), [stream([[1, 2, 3]])], 5, lambda amount: None)
    assert not marked.any()
    assert share == 0


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=40), st.integers(1, 40))
def test_hashes_are_the_polynomial(tokens, n):
    n = min(n, len(tokens))
    mixed = deduplicate._mix(np.array(tokens, dtype=np.uint32))
    b = deduplicate._MULTIPLIER
    expected = [sum(int(mixed[i + j]) * b ** (n - 1 - j) for j in range(n)) % 2**64 for i in range(len(tokens) - n + 1)]
    assert deduplicate._polynomials(mixed, n).tolist() == expected


def test_a_stream_on_disk(tmp_path):
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    tokens_of(rows).tofile(tmp_path / "a.bin")
    on_disk = Stream.on_disk(tmp_path / "a.bin", np.dtype("<u2"), stream(rows).documents)
    assert on_disk.size == 10
    assert on_disk.read(2, 5).tolist() == [3, 4, 5]
    marked, _ = repeated(on_disk, [stream([[2, 3, 4]])], 3, lambda amount: None)
    assert np.flatnonzero(marked).tolist() == [1]
