import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freenergy.core.errors import UserError
from freenergy.corpus import CorpusSettings
from freenergy.corpus.windows import make_windows, read_windows, write_windows


def all_windows(*arguments, part=1 << 18):
    return np.concatenate(list(make_windows(*arguments, part)))


def by_hand(lengths, settings):
    """Windows as (start, length, document), read off the definition; lengths do not count EOS."""
    found, begin = [], 0
    for document, n in enumerate(lengths):
        m = n + (settings.ending == "eos")
        k = 0
        while True:
            start = k * settings.step
            length = min(settings.continuation, m - start - settings.prefix)
            if length < (settings.continuation if settings.ending == "fixed" else 1):
                break
            found.append((begin + start, length, document))
            k += 1
        begin += n + 1
    return found


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8),
    st.integers(0, 6),
    st.integers(1, 6),
    st.none() | st.integers(1, 9),
    st.sampled_from(["fixed", "eos"]),
    st.sampled_from([1, 3, 1 << 18]),
)
def test_windows_are_those_of_the_definition(lengths, prefix, continuation, stride, ending, part):
    settings = CorpusSettings(source="x", prefix=prefix, continuation=continuation, stride=stride, ending=ending)
    bounds = np.cumsum([0, *(n + 1 for n in lengths)])
    expected = by_hand(lengths, settings)
    if not expected:
        with pytest.raises(UserError, match=rf"no test document is long enough.*the longest has {max(lengths)}\)"):
            all_windows(bounds, settings, "test")
        return
    assert max(map(len, make_windows(bounds, settings, "test", part))) <= part
    places = all_windows(bounds, settings, "test", part=part)
    assert list(zip(places["start"], places["length"], places["document"], strict=True)) == expected
    if ending == "eos" and stride is None:
        after_prefix = sum(max(n + 1 - prefix, 0) for n in lengths)
        assert places["length"].sum() == after_prefix, "disjoint continuations cover all that follows a prefix"


def test_stored_windows(tmp_path):
    settings = CorpusSettings(source="x", prefix=3, continuation=2, ending="eos")
    places = all_windows(np.array([0, 10, 11, 30]), settings, "train")
    path = tmp_path / "train.windows.npy"
    again = write_windows(path, np.array_split(places, 4))
    assert isinstance(again, np.memmap), "many windows must not be held in memory"
    assert np.array_equal(again, places)
    np.save(tmp_path / "plain.npy", places)
    assert path.read_bytes() == (tmp_path / "plain.npy").read_bytes(), "one file, however it was written"


@pytest.mark.parametrize("harm", ["torn", "short", "of other columns", "pickled", "two dimensions"])
def test_damaged_windows_are_one_sentence(tmp_path, harm):
    path = tmp_path / "train.windows.npy"
    places = all_windows(np.array([0, 10]), CorpusSettings(source="x", prefix=3, continuation=2), "train")
    write_windows(path, [places])
    match harm:
        case "torn":
            path.write_bytes(b"torn")
        case "short":
            path.write_bytes(path.read_bytes()[:-1])
        case "of other columns":
            np.save(path, np.zeros(3))
        case "pickled":
            np.save(path, np.array([{}], dtype=object), allow_pickle=True)
        case _:
            np.save(path, np.zeros((2, 2), dtype=places.dtype))
    with pytest.raises(UserError, match="run the corpus stage again"):
        read_windows(path)
