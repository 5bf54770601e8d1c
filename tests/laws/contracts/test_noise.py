"""Every registered noise: one row or more."""

import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, Truncation
from freenergy.core.roles import Draws, Examples
from freenergy.noise.from_lm import FromLM, Learned
from freenergy.noise.infill import Infilling
from freenergy.noise.mixture import Mixture
from freenergy.noise.registry import NOISES
from freenergy.testing import check_noise
from freenergy.testing.networks import tiny_network
from tables import NgramLogits

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


CONTRACT = {
    "base": [(from_lm, 1, 1e-12), (lambda: from_lm(temperature=0.6), 1, 1e-12), (lambda: from_lm(top_k=2), 1, 1e-12)],
    "infilled": [(infill, 1, 1e-5)],
    "learned": [(table, 1, 1e-12), (network, 1, 1e-5)],
    "mixture": [(lambda: Mixture([(from_lm(), 1), (from_lm(temperature=0.4), 1)]), 2, 1e-12)],
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
