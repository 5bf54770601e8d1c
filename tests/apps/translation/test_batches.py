"""Batches of like length: every pair once an epoch, chosen by the step alone."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freenergy.apps.translation.pairs import EncodedPairs, PairData, by_length, cut, padded
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Data

EOS = 0


def made(count, seed):
    """Pairs that can be told apart: the first token of both sides is the pair's number."""
    lengths = (Rng(seed).uniform(count, 2) * 9).int().tolist()
    return EncodedPairs(*([[i + 1, *[7] * row[side], EOS] for i, row in enumerate(lengths)] for side in (0, 1)))


def data(*, batch_size=60, accumulate=1, seed=0, count=150):
    return PairData(
        made(count, 1), made(40, 2), batch_size=batch_size, accumulate=accumulate, held_out_tokens=50, rng=Rng(seed)
    )


def numbers(batch):
    assert torch.equal(batch.tokens[:, 0], batch.given.tokens[:, 0])
    return batch.tokens[:, 0].tolist()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_pair_comes_once_an_epoch_and_each_epoch_in_another_order(accumulate):
    found = data(batch_size=60 * accumulate, accumulate=accumulate)
    assert isinstance(found, Data)
    count = len(found._batches)
    assert found.epoch_steps == -(-count // accumulate)
    places = [divmod(i, accumulate) for i in range(2 * count)]
    batches = [numbers(found.batch(step + 1, micro)) for step, micro in places]
    first, second = batches[:count], batches[count:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(1, 151))
    assert first != second
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))  # other neighbours too


def test_a_batch_is_known_by_its_step_and_the_seed():
    one, same, other = data(), data(), data(seed=1)
    steps = [9, 31, 2, 1, 55, 9]
    found = {step: numbers(one.batch(step, 0)) for step in range(1, 60)}
    for step in steps:
        assert numbers(same.batch(step, 0)) == found[step]
    assert [numbers(other.batch(step, 0)) for step in range(1, 10)] != [found[step] for step in range(1, 10)]


def test_a_batch_is_padded_and_within_its_tokens():
    found = data()
    for step in range(1, found.epoch_steps + 1):
        batch = found.batch(step, 0)
        assert batch.known == 0
        assert batch.tokens.numel() <= 60
        for tokens, mask in ((batch.tokens, batch.mask), (batch.given.tokens, batch.given.mask)):
            assert torch.equal(mask, torch.arange(tokens.shape[1]) < mask.sum(1, keepdim=True))
            assert (tokens[~mask] == EOS).all()
            assert (tokens.gather(1, mask.sum(1, keepdim=True) - 1) == EOS).all()
            assert (tokens == EOS).sum() == (~mask).sum() + len(mask)


def test_held_out_pairs_come_all_and_in_the_same_order():
    found = data()
    first, again = ([numbers(batch) for batch in found.held_out()] for _ in range(2))
    assert first == again
    assert sorted(chain(*first)) == list(range(1, 41))
    assert len(first) > 1


def test_a_batch_that_holds_no_sentence_is_refused():
    with pytest.raises(UserError, match="batch_size counts tokens"):
        data(batch_size=16, accumulate=4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 100))
def test_cutting_leaves_nothing_out_and_fills_the_batches(lengths, tokens):
    ascending = sorted(lengths)
    batches = cut(ascending, tokens)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert len(batch) * ascending[batch[-1]] <= tokens
        if following is not None:  # one row more would not have fitted
            assert (len(batch) + 1) * ascending[following[0]] > tokens
    rows = by_length(lengths, tokens)
    assert [lengths[i] for batch in rows for i in batch] == ascending


def test_long_pairs_are_left_out_of_training_and_cut_elsewhere():
    pairs = EncodedPairs([[1, 2, EOS], [1, 2, 3, 4, EOS]], [[1, EOS], [5, EOS]])
    assert pairs.fitting(3) == EncodedPairs([[1, 2, EOS]], [[1, EOS]])
    assert pairs.cut(3) == EncodedPairs([[1, 2, EOS], [1, 2, EOS]], [[1, EOS], [5, EOS]])


def test_padding_repeats_the_end():
    tokens, mask = padded([[4, 5, EOS], [EOS]])
    assert tokens.tolist() == [[4, 5, EOS], [EOS, EOS, EOS]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
