"""Energies in int8: close to float32, a function of the string alone, saved and loaded to the bit, not trainable."""

import copy

import pytest
import tokenizers
import torch
import transformers

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.int8 import Int8Linear, int8_error, measured, quantised
from freenergy.energies.registry import load_energy
from freenergy.energies.unit import Unit, UnitEnergy
from freenergy.lm.presets import build
from freenergy.testing import check_energy

V = 50
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def base(name="GPTNeoX"):
    more = {} if name == "GPT2" else {"intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=None, max_position_embeddings=64, **SIZES, **more
    )
    return HuggingFaceLM(build(config, Rng(0)), eos=0)


def texts(seed, B=2, N=12, P=9, L=7):
    tokens = 1 + (Rng(seed).uniform(B, P + N * L) * (V - 1)).long()
    lengths = 1 + (Rng(seed).child("lengths").uniform(B, N) * L).long()
    return Continuations(Sequences(tokens[:, :P], torch.full((B,), P)), tokens[:, P:].reshape(B, N, L), lengths)


def energy_of(kind, lm):
    energy = {
        "bit": lambda: Bit.from_base(BitEnergy(), lm),
        "prefix once": lambda: Bit.from_base(BitEnergy(prefix_once=True, over="all"), lm),
        "unit": lambda: Unit(UnitEnergy(), lm),
    }[kind]()
    with torch.no_grad():
        energy.readout.weight.copy_(Rng(1).normal(1, 32))
    return energy.eval()


KINDS = ["bit", "prefix once", "unit"]


@pytest.mark.parametrize("name", ["GPTNeoX", "GPT2", "Llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_energies_are_those_of_float32_within_a_fraction_of_their_spread(kind, name):
    energy, x = energy_of(kind, base(name)), texts(3)
    wanted = energy(x).detach()
    assert quantised(energy, texts(2)) is energy
    found = energy(x)
    largest, typical = int8_error(energy, x)
    assert largest == pytest.approx((found - wanted).abs().max().item(), rel=1e-2)
    assert 0 < typical <= largest < 0.15 * wanted.std().item()
    check_energy(energy, x)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_function_of_the_string_alone(kind):
    """Beside other strings, longer ones and such as were never shown, the energy stays."""
    energy, x = quantised(energy_of(kind, base()), texts(2)), texts(3)
    together = energy(x)
    for b in range(2):
        for n in range(x.shape[1]):
            alone = energy(x[b : b + 1].candidates(slice(n, n + 1)))
            assert abs(alone.item() - together[b, n].item()) < 1e-5 + 0.02 * together.std().item()


def test_one_layer_against_the_formula_and_against_scales_of_the_batch():
    layer, x = torch.nn.Linear(16, 8), Rng(4).normal(5, 16).float()
    with torch.no_grad():
        layer.weight.copy_(Rng(5).normal(8, 16))
        low, high = (value.item() for value in x.aminmax())
        found = Int8Linear(layer, low, high).requires_grad_(False)
        scale = 1.2 * (high - low) / 127
        zero = round((0.1 * (high - low) - low) / scale)
        q = ((x / scale).round() + zero).clamp(0, 255)
        s_o = layer.weight.abs().amax(1) / 127
        k = (layer.weight / s_o.unsqueeze(1)).round()
        wanted = (q - zero) @ k.T * scale * s_o + layer.bias
        torch.testing.assert_close(found(x), wanted, atol=1e-4, rtol=0)
        # a row's numbers are the same bits beside a row that is far out
        beside = torch.cat([x, 50 * x[:1]])
        assert torch.equal(found(beside)[:5], found(x))


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_give_equal_bits(kind, tmp_path):
    lm, x = base(), texts(3)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    energy = quantised(energy_of(kind, lm), texts(2))
    energy.save_pretrained(tmp_path / "energy")
    again = load_energy(tmp_path / "energy", base=lm, tokenizer=Tokenizer(words, eos=0))
    assert again.settings.int8
    assert torch.equal(again(x), energy(x))
    assert int8_error(again, x) == int8_error(energy, x) != (0.0, 0.0)


def test_the_setting_waits_for_the_training():
    lm = base()
    energy = Bit.from_base(BitEnergy(int8=True), lm)
    assert not any(isinstance(layer, Int8Linear) for layer in energy.modules())
    energy(texts(2)).sum().backward()
    assert energy.readout.weight.grad is not None


def test_gradients_are_refused_in_one_sentence():
    energy = quantised(energy_of("bit", base()), texts(2))
    assert not any(weight.requires_grad for weight in energy.parameters())
    energy.requires_grad_(True)
    with pytest.raises(UserError, match="an energy in int8 has no gradients: train it in float32"):
        energy(texts(3))


def test_other_places_are_refused_in_one_sentence():
    energy, x = energy_of("bit", base()), texts(2)
    with pytest.raises(UserError, match="the energy is not in int8"):
        int8_error(energy, x)
    with pytest.raises(UserError, match=r"int8 is read on a CPU from float32, not on cpu from torch\.float64"):
        quantised(copy.deepcopy(energy).double(), x)
    with pytest.raises(UserError, match="int8 is read on a CPU from float32, not on meta"):
        Int8Linear(torch.nn.Linear(32, 4).requires_grad_(False), -1.0, 1.0)(torch.zeros(1, 32, device="meta"))
    quantised(energy, x)
    with pytest.raises(UserError, match="quantise it once"):
        quantised(energy, x)
    with pytest.raises(UserError, match="a Linear is not read in int8"):
        quantised(torch.nn.Linear(1, 1), x)


def test_ranges_are_the_smallest_and_the_largest_input():
    energy, x = energy_of("unit", base()), texts(2)
    seen, name = [], "layers.0.mlp.dense_h_to_4h"
    hook = energy.trunk.network.get_submodule(name).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ranges = measured(energy, x)
    hook.remove()
    assert ranges[name] == (min(part.min().item() for part in seen), max(part.max().item() for part in seen))
    assert len(ranges) == 2 * 4


def test_a_base_that_has_no_network_still_says_so():
    with pytest.raises(UserError, match="a TabularLM has no network"):
        Bit.from_base(BitEnergy(int8=True), TabularLM.random(Rng(0), vocab_size=V, order=1))
