"""Energies read while the base draws: the same numbers as reading the text, and the base does not read twice."""

import pytest
import torch
import transformers

from freenergy import HuggingFaceLM, Rng, Sequences, SequenceSpace, Truncation, UserError
from freenergy.energies.call import energies_in_batches
from freenergy.energies.probe import Probe, ProbeEnergy
from freenergy.energies.product import Product
from freenergy.models.residual import Residual, Split

V = 9
SPACE = SequenceSpace(vocab_size=V, length=5, eos=0)
CONTEXTS = Sequences.from_lists([[1, 2], [3]])


def network(seed):
    config = transformers.GPT2Config(
        vocab_size=V, num_hidden_layers=3, num_attention_heads=4, hidden_size=16, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.GPT2LMHeadModel(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.4)
    return HuggingFaceLM(model, eos=0)


@pytest.fixture(scope="module")
def base():
    return network(1)


class Counting(torch.nn.Module):
    """Reads text, and counts what it reads."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def forward(self, x):
        self.read += x.shape[0] * x.shape[1]
        return 0.1 * x.tokens.sum(-1).double()


def probe_of(base, seed=1, **settings):
    probe = Probe(ProbeEnergy(**settings), base)
    x = base.sample(CONTEXTS, 20, SPACE, Rng(9)).x
    with torch.no_grad():
        probe.fit_scale([probe.features(x)])
        probe.weight.copy_(0.3 * Rng(seed).normal(len(probe.names)))
    return probe


def energies(base):
    first, second = probe_of(base, 1, layers=(0, 2)), probe_of(base, 2, layers=(1, 2), statistics=False)
    other = probe_of(network(2), 3)
    numbers = probe_of(base, 4, states=False)
    return {
        "a probe": (first, 1),
        "a probe of numbers alone": (numbers, 1),
        "a product": (Product([first, Counting()]), 1),
        "two probes in a product of products": (Product([Product([first, Counting()], [0.5, 2.0]), second]), 2),
        "a probe of another base": (Product([other, first]), 1),
        "no probe": (Counting(), 0),
    }


NAMES = [
    "a probe", "a probe of numbers alone", "a product", "two probes in a product of products",
    "a probe of another base", "no probe",
]  # fmt: skip


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=4, temperature=0.8)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_energies_are_those_of_the_text(name, truncation, base):
    energy, num_probes = energies(base)[name]
    assert len(Split.of(energy, base).probes) == num_probes
    split = Split.of(energy, base)
    draws, E = split.draw(base, CONTEXTS, 12, SPACE, Rng(3), truncation)
    E = E + split.rest(draws.x)
    plain = base.sample(CONTEXTS, 12, SPACE, Rng(3), truncation)
    assert torch.equal(draws.x.tokens, plain.x.tokens)
    with torch.no_grad():
        expected = energy(plain.x).double()
    torch.testing.assert_close(E, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
    assert E.dtype == torch.float64


def test_the_base_does_not_read_what_it_has_drawn(base, monkeypatch):
    monkeypatch.setattr(HuggingFaceLM, "trace", lambda *_: pytest.fail("the text was read again"))
    monkeypatch.setattr(Probe, "features", lambda *_, **__: pytest.fail("the text was read again"))
    counting = Counting()
    probe = Probe(ProbeEnergy(), base)
    with torch.no_grad():
        probe.weight.copy_(Rng(1).normal(len(probe.names)))
    found = Residual(base, Product([probe, counting])).propose(CONTEXTS, 60, SPACE, Rng(0), batch_size=25)
    assert found.energy.shape == (2, 60)
    assert 0 < counting.read == int(found.first().sum()) < 120  # equal strings once


def test_a_string_is_read_once_and_forbidden_texts_pass_where_they_may(base):
    x = base.sample(CONTEXTS, 40, SPACE, Rng(0)).x
    counting = Counting()
    found = energies_in_batches(counting, x, distinct=True)
    assert torch.equal(found, 0.1 * x.tokens.sum(-1).double())
    assert counting.read < 80

    def forbids(x):
        return torch.where(x.tokens[:, :, 0] == x.tokens[0, 0, 0], torch.inf, 0.0).double()

    assert energies_in_batches(forbids, x, distinct=True, allow_inf=True).isinf().any()
    with pytest.raises(UserError, match="returned inf"):
        energies_in_batches(forbids, x, distinct=True)


def test_a_broken_probe_is_one_sentence(base):
    probe = probe_of(base)
    with torch.no_grad():
        probe.bias.fill_(torch.nan)
    with pytest.raises(UserError, match="the energy Probe returned nan for continuation 0 of context 0"):
        Residual(base, probe).propose(CONTEXTS, 3, SPACE, Rng(0))
