import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Continuations, Sequences, SequenceSpace, UserError

tokens = st.lists(st.integers(1, 9), max_size=4)


@given(st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=4))
def test_joined_is_context_then_continuation(rows):
    x = Continuations.from_lists([c for c, _, _ in rows], [[a, b] for _, a, b in rows])
    assert x.joined().lists() == [c + y for c, a, b in rows for y in (a, b)]
    assert x.flat().lists() == [y for _, a, b in rows for y in (a, b)]
    assert x.lists() == [[a, b] for _, a, b in rows]
    trimmed = x.trimmed()
    assert trimmed.joined().lists() == x.joined().lists()
    assert trimmed.tokens.shape[2] == max(len(y) for _, a, b in rows for y in (a, b))


@given(st.lists(tokens, min_size=1, max_size=5), st.integers(0, 4))
def test_cat_and_slices_undo_each_other(rows, cut):
    whole = Sequences.from_lists(rows)
    parts = [part for part in (whole[:cut].trimmed(), whole[cut:].trimmed()) if len(part)]
    assert Sequences.cat(parts).lists() == rows


@pytest.mark.parametrize(("eos", "size"), [(None, 27), (0, 15), (2, 15)])
def test_enumerate_lists_every_string_once(eos, size):
    space = SequenceSpace(vocab_size=3, length=3, eos=eos)
    strings = [tuple(x) for x in space.enumerate().lists()]
    assert len(strings) == len(set(strings)) == space.size == size
    for x in strings:
        ended = eos is not None and x[-1] == eos
        assert len(x) == 3 or ended
        assert eos not in x[:-1]


def test_no_string_is_a_prefix_of_another():
    strings = [tuple(x) for x in SequenceSpace(vocab_size=3, length=3, eos=1).enumerate().lists()]
    assert not any(a != b and b[: len(a)] == a for a in strings for b in strings)


def test_lengths_stop_after_the_first_eos():
    space = SequenceSpace(vocab_size=5, length=4, eos=0)
    drawn = torch.tensor([[1, 0, 2, 0], [1, 2, 3, 4], [0, 1, 1, 1], [1, 2, 3, 0]])
    assert space.lengths(drawn).tolist() == [2, 4, 1, 4]


def test_bad_input_is_one_sentence():
    with pytest.raises(UserError, match="length is 0: set it to at least 1"):
        SequenceSpace(vocab_size=3, length=0)
    with pytest.raises(UserError, match="too many to enumerate"):
        SequenceSpace(vocab_size=1000, length=10).enumerate()
    with pytest.raises(UserError, match="same number"):
        Continuations.from_lists([[1], [2]], [[[1]], [[1], [2]]])
    with pytest.raises(UserError, match="give one each"):
        Continuations.from_lists([[1], [2]], [[[1]]])
