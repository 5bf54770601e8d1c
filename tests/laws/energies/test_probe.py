"""The probe: its numbers from plain loops, the same while sampling, the same bits from disk."""

import math
import statistics as plain

import pytest
import tokenizers
import torch
import transformers

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.probe import Probe, ProbeEnergy, statistics
from freenergy.lm.activations import Trace
from freenergy.testing import check_energy

V, H = 9, 16


@pytest.fixture(scope="module")
def base():
    config = transformers.GPT2Config(
        vocab_size=V, num_hidden_layers=3, num_attention_heads=4, hidden_size=H, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.4)
    return HuggingFaceLM(model, eos=0)


@pytest.fixture
def x():
    contexts = [[1, 2, 3], [4], []]
    return Continuations.from_lists(
        contexts, [[[(b + 2 * n + 3 * t) % V for t in range(2 * n + 1)] for n in range(4)] for b in range(3)]
    )


def tuned(energy, x):
    with torch.no_grad():
        energy.fit_scale([energy.features(x)])
        energy.weight.copy_(Rng(1).normal(len(energy.names)))
        energy.bias.fill_(0.25)
    return energy


def slow_statistics(log_p, entropy, rank):
    n, quarter = len(log_p), math.ceil(len(log_p) / 4)
    return [
        sum(log_p),
        plain.mean(log_p),
        plain.pstdev(log_p),
        min(log_p),
        plain.mean(entropy),
        plain.pstdev(entropy),
        plain.mean(p + h for p, h in zip(log_p, entropy, strict=True)),
        plain.mean(math.log(r) for r in rank),
        math.log(max(rank)),
        sum(r == 1 for r in rank) / n,
        sum(r > 100 for r in rank) / n,
        n,
        plain.mean(log_p[:quarter]),
        plain.mean(log_p[-quarter:]),
    ]


def test_statistics_are_those_of_plain_lists():
    lengths, L = [1, 3, 4, 9], 9
    log_p, entropy = -Rng(0).uniform(1, 4, L) * 6, Rng(1).uniform(1, 4, L) * 3
    rank = torch.tensor([[1, 100, 101, 3, 1, 1, 7000, 2, 99], [100] * L, [101] * L, [2, 1, 1, 1, 1, 1, 1, 1, 500]])
    mask = torch.arange(L) < torch.tensor(lengths).view(1, 4, 1)
    found = statistics(Trace(torch.zeros(1, 4, 0, H), log_p, entropy, rank.view(1, 4, L).log(), mask))
    for i, n in enumerate(lengths):
        lists = (values[i, :n].tolist() for values in (log_p[0], entropy[0], rank))
        wanted = torch.tensor(slow_statistics(*lists), dtype=torch.float64)
        torch.testing.assert_close(found[0, i], wanted, atol=1e-6, rtol=0)


def test_features_are_states_then_statistics(base, x):
    probe = Probe(ProbeEnergy(layers=(3, 0)), base)
    features, trace = probe.features(x), base.trace(x, (0, 3))
    assert features.shape == (3, 4, 2 * H + 14) == (3, 4, len(probe.names))
    assert probe.names[H] == "layer 3, state 0"
    assert torch.equal(features[..., : 2 * H], trace.states.flatten(2))
    assert torch.equal(features[..., 2 * H :], statistics(trace))
    assert torch.equal(Probe(ProbeEnergy(states=False), base).features(x), statistics(trace))
    assert Probe(ProbeEnergy(statistics=False), base).layers == (1, 2, 3)


def test_it_is_an_energy_and_starts_at_zero(base, x):
    probe = Probe(ProbeEnergy(), base)
    assert (probe(x) == 0).all()
    tuned(probe, x)
    assert probe(x).std() > 0.1
    check_energy(probe, x, tolerance=1e-4)


def test_energies_are_free_while_sampling(base, x):
    probe = tuned(Probe(ProbeEnergy(), base), x)
    space = SequenceSpace(vocab_size=V, length=6, eos=0)
    draws, trace = base.sample_traced(Sequences.from_lists([[1, 2], [3]]), 5, space, Rng(3), layers=probe.layers)
    torch.testing.assert_close(probe.energy_of_trace(trace), probe(draws.x), atol=1e-3, rtol=0)
    assert probe(draws.x).std() > 0.1


def test_only_weights_learn(base, x):
    probe = Probe(ProbeEnergy(), base)
    assert {name for name, _ in probe.named_parameters()} == {"weight", "bias"}
    probe(x).sum().backward()
    torch.testing.assert_close(probe.weight.grad, -probe.standardised(probe.features(x)).sum((0, 1)))
    assert probe.bias.grad == -12


def test_saved_and_loaded_it_has_the_same_bits(base, x, tmp_path):
    probe = tuned(Probe(ProbeEnergy(layers=(1, 2)), base), x)
    probe.save_pretrained(tmp_path / "energy")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    again = Probe.from_pretrained(tmp_path / "energy", base=base, tokenizer=Tokenizer(inner, 0))
    assert torch.equal(again(x), probe(x))
    assert again.settings == probe.settings
    (tmp_path / "energy" / "energy.safetensors").unlink()
    with pytest.raises(UserError, match="no file"):
        Probe.from_pretrained(tmp_path / "energy", base=base, tokenizer=Tokenizer(inner, 0))


def test_what_cannot_be_is_said(base):
    with pytest.raises(UserError, match="TabularLM does not show"):
        Probe(ProbeEnergy(), TabularLM.random(Rng(0), vocab_size=V, order=1))
    with pytest.raises(UserError, match="no layer 4"):
        Probe(ProbeEnergy(layers=(4,)), base)
    with pytest.raises(UserError, match="nothing to read"):
        Probe(ProbeEnergy(states=False, statistics=False), base)
