"""Repetition by hand-counted strings, by brute force, and for continuations of any length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Continuations, Repetition, UserError
from freenergy.energies.repetition import NAMES, RepetitionEnergy

V = 6
COUNTS = torch.tensor([9, 5, 3, 2, 1, 0])
TOKENS = st.lists(st.integers(0, V - 1), max_size=9)


def energy():
    return Repetition(RepetitionEnergy(), COUNTS)


def by_hand(prefix, x, counts=COUNTS, total=20):
    """The features of one string, place by place in plain Python."""
    whole, found = prefix + x, dict.fromkeys(NAMES, 0.0)
    for t in range(len(prefix), len(whole)):
        for n in range(1, 5):
            if t + 1 >= n:
                gram = whole[t - n + 1 : t + 1]
                ends = [s for s in range(n - 1, t) if whole[s - n + 1 : s + 1] == gram]
                found[f"{n}-gram: places that repeat the prefix"] += any(s < len(prefix) for s in ends)
                found[f"{n}-gram: places that repeat the continuation"] += any(s >= len(prefix) for s in ends)
        for near in (1, 8, 32, 128):
            found[f"places that repeat one of the last {near}"] += whole[t] in whole[max(0, t - near) : t]
        idf = np.log((total + V) / (int(counts[whole[t]]) + 1))
        found["Σ idf of tokens of the prefix"] += idf * (whole[t] in prefix)
        found["Σ idf of tokens of the continuation"] += idf * (whole[t] in whole[len(prefix) : t])
    found["share of distinct tokens"] = len(set(x)) / max(len(x), 1)
    found["length"] = float(len(x))
    return list(found.values())


@given(TOKENS, TOKENS, TOKENS)
def test_features_are_those_of_plain_counting(prefix, first, second):
    found = energy().features(Continuations.from_lists([prefix], [[first, second]]))
    wanted = torch.tensor([[by_hand(prefix, first), by_hand(prefix, second)]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)


def test_training_text_does_not_count_itself():
    x = [4, 4, 1]
    left = COUNTS.clone()
    for token in x:
        left[token] -= 1
    found = energy().features(Continuations.from_lists([[4, 2]], [[x]]), leave_self_out=True)
    wanted = by_hand([4, 2], x, left.clamp(min=0), 17)
    torch.testing.assert_close(found[0, 0], torch.tensor(wanted, dtype=torch.float64))


def test_sixteen_weights_and_strange_tokens():
    assert len(NAMES) == 16
    with pytest.raises(UserError, match="token id 6 is not in the vocabulary of 6"):
        energy().features(Continuations.from_lists([[1]], [[[6]]]))
