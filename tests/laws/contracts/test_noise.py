"""Every registered noise: one row or more."""

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, Truncation
from freenergy.core.progress import Silent
from freenergy.core.roles import Draws, Examples
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise.from_lm import FromLM
from freenergy.noise.infill import Infilling
from freenergy.noise.learned import Learned, NgramLogits
from freenergy.noise.mixture import Mixture
from freenergy.noise.registry import NOISES
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.noise.stored import Stored
from freenergy.testing import check_noise
from freenergy.testing.networks import tiny_network

V = 3
SPACE = SequenceSpace(vocab_size=V, length=2, eos=0)
BASE = TabularLM.random(Rng(2), vocab_size=V, order=1)
ROWS = torch.tensor([7, 2])
DATA = Examples(Continuations.from_lists([[1, 2], [2, 2]], [[[1, 2]], [[2, 1]]]), ROWS)


def from_lm(**truncation):
    return FromLM(BASE, SPACE, Truncation(**truncation))


def table():
    q = NgramLogits(vocab_size=V, order=1)
    with torch.no_grad():
        q.logits.copy_(Rng(5).normal(V, V))
    return Learned(q, q, BASE, SPACE)


def network():
    q = tiny_network("Llama", vocab_size=V)
    noise = Learned(q, q.model, BASE, SPACE)
    torch.optim.SGD(q.model.parameters(), lr=0.5).step(lambda: train(noise))  # its law is that of the new weights
    return noise


def train(noise):
    loss = -noise.log_noise(DATA.x).mean()
    loss.backward()
    return loss


def infill():
    model = tiny_network("GPTNeoX", vocab_size=V + 1).model
    return Infilling(model, mask_token=V, share=0.4, lm=BASE)


def stored(tmp_path):
    stream, rows = np.array([1, 2, 1, 2, 2, 2, 2, 1] * 3), torch.arange(4)
    windows = Windows(stream, places_of(np.arange(4) * 4, 2), 2, 2)
    marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
    identity = Identity(**marks, split="train", per_prefix=3, space=SPACE)
    NegativeShards(tmp_path, rows, windows, from_lm(temperature=0.6), identity, Rng(5)).write(Silent())
    noise = Stored(NegativeStore.open(tmp_path, identity), from_lm(temperature=0.6))
    return noise, Examples(windows.continuations(rows[1:3]), rows[1:3])


CONTRACT = {
    "base": [(from_lm, 1, 1e-12), (lambda: from_lm(temperature=0.6), 1, 1e-12), (lambda: from_lm(top_k=2), 1, 1e-12)],
    "infilled": [(infill, 1, 1e-5)],
    "learned": [(table, 1, 1e-12), (network, 1, 1e-5)],
    "mixture": [(lambda: Mixture([(from_lm(), 1), (from_lm(temperature=0.4), 1)]), 2, 1e-12)],
    "stored": [],  # below
}


def test_every_noise_has_a_row():
    assert set(CONTRACT) == set(NOISES)


@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for name, rows in CONTRACT.items() for row in range(len(rows))], ids=str
)
def test_draws_have_the_law_that_is_said(name, row):
    make, num, tolerance = CONTRACT[name][row]
    noise = make()
    assert isinstance(noise, NOISES[name])
    check_noise(noise, BASE, DATA, SPACE, num=num, tolerance=tolerance)
    assert (noise.log_noise(DATA.x) is None) == (name == "infilled")


def test_stored_noise_has_the_law_of_its_source(tmp_path):
    noise, data = stored(tmp_path)
    check_noise(noise, BASE, data, SPACE, tolerance=1e-12, is_enumerable=False)
    assert Stored(noise.store).log_noise(data.x) is None


class Mutant:
    """Draws of the base that say that they are tempered, or forget what is truncated, or look at the batch."""

    def __init__(self, drawn, said, shift=0):
        self.drawn, self.said, self.shift = drawn, said, shift

    def init(self, rng):
        return {}

    def draw(self, model, state, data, num, rng):
        rng = rng.shift(candidates=self.shift * len(data.rows))
        state, draws = self.drawn.draw(model, state, data, num, rng)
        return state, Draws(draws.x, draws.log_base, self.said.log_noise(draws.x))

    def log_noise(self, x):
        return self.said.log_noise(x)


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (Mutant(from_lm(), from_lm(temperature=0.6)), "the law of the draws is log_noise"),
        (Mutant(from_lm(top_k=2), from_lm()), "the law of the draws is log_noise"),
        (Mutant(from_lm(), from_lm(), shift=1), "depend on the batch"),
    ],
)
def test_a_noise_with_another_law_is_refused(mutant, words):
    with pytest.raises(AssertionError, match=words):
        check_noise(mutant, BASE, DATA, SPACE)
