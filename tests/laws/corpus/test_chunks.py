"""Chunk windows cover each window's continuation once, in order, given the true past; draws for them fit their room."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Rng, SequenceSpace, TabularLM, UserError
from freenergy.core.roles import Examples
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise.from_lm import FromLM

P, L, V = 3, 7, 5
LM = TabularLM.random(Rng(2), vocab_size=V, order=2)


def windows_of(lengths):
    stream = np.arange(100) * 7 % 61 % V
    starts = np.arange(len(lengths)) * 5
    return Windows(stream, places_of(starts, np.array(lengths), np.arange(len(lengths)) // 2), P, L)


@given(st.lists(st.integers(1, L), min_size=1, max_size=6), st.permutations(range(1, L + 1)), st.integers(1, 3))
def test_the_chunks_of_a_window_are_its_text(lengths, sizes, num):
    whole, sizes = windows_of(lengths), tuple(sizes[:num])
    windows, first = whole.in_chunks(sizes), 0
    true = whole.continuations(torch.arange(len(whole)))
    assert windows.num_whole == len(lengths)
    for m in sizes:
        for w, ((text,), context) in enumerate(zip(true.lists(), true.contexts.lists(), strict=True)):
            rows = torch.arange(first, first - (-len(text) // m))
            data = windows.examples(rows)
            assert [token for (chunk,) in data.x.lists() for token in chunk] == text
            assert data.x.contexts.lists() == [context + text[:k] for k in range(0, len(text), m)]
            assert data.rooms.tolist() == [min(m, L - k) for k in range(0, len(text), m)]
            assert data.x.tokens.shape[2] == max(sizes)
            assert (windows.documents[rows.numpy()] == whole.documents[w]).all()
            if m == sizes[0]:
                assert windows.rows_of(torch.tensor([w])).tolist() == rows.tolist()
                assert windows.whole_of(rows.numpy()).tolist() == [w]
            first += len(rows)
    assert first == len(windows)


def test_draws_fill_the_room_of_their_chunk_whatever_stands_next_to_it():
    windows, space = windows_of([7, 2, 7]).in_chunks((3,)), SequenceSpace(vocab_size=V, length=3)
    rows = torch.tensor([5, 0, 2, 6, 1, 3])
    noise, data = FromLM(LM, space), windows.examples(rows)
    draws = noise.draw(None, {}, data, 4, Rng(1))[1]
    assert draws.x.lengths.tolist() == [[min(3, 7 - 3 * k)] * 4 for k in (1, 0, 2, 2, 1, 0)]
    torch.testing.assert_close(draws.log_base, LM.log_prob(draws.x))
    for b, row in enumerate(rows):
        alone = noise.draw(None, {}, windows.examples(row.reshape(1)), 4, Rng(1))[1]
        assert alone.x.lists() == draws.x[b : b + 1].lists()


def test_rooms_of_the_whole_space_change_nothing():
    space, windows = SequenceSpace(vocab_size=V, length=3, eos=0), windows_of([7, 7]).in_chunks((3,))
    data = windows.examples(torch.tensor([0, 1]))
    assert data.rooms.tolist() == [3, 3]
    plain = FromLM(LM, space).draw(None, {}, Examples(data.x, data.rows), 5, Rng(3))[1]
    assert FromLM(LM, space).draw(None, {}, data, 5, Rng(3))[1].x.lists() == plain.x.lists()


@pytest.mark.parametrize("sizes", [(0,), (8,), (3, 3)])
def test_lengths_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match="chunk is"):
        windows_of([7]).in_chunks(sizes)
