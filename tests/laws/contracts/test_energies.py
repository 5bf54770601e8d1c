"""Every public energy keeps the contract of its role, starts at E = 0 and comes back from disk: one row each."""

import tempfile

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import freenergy
from freenergy import (
    Bit,
    Continuations,
    HuggingFaceLM,
    Logits,
    LogRatio,
    NgramFeatures,
    Probe,
    Product,
    Repetition,
    Rng,
    SecondLM,
    Tokenizer,
    Unit,
    load_energy,
)
from freenergy.energies.bit import BitEnergy
from freenergy.energies.log_ratio import LogRatioEnergy
from freenergy.energies.logits import LogitsEnergy
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.energies.ngram_tables import NgramTables
from freenergy.energies.probe import ProbeEnergy
from freenergy.energies.repetition import RepetitionEnergy
from freenergy.energies.second_lm import SecondLMEnergy, second_model
from freenergy.energies.unit import UnitEnergy
from freenergy.lm.presets import build
from freenergy.testing import check_energy
from freenergy.testing.networks import tiny_network

V = 8
X = Continuations.from_lists(
    [[1, 2, 3, 4, 5], [6], [], [7, 0, 5]],
    [[[1, 2, 3], [3], [4, 5]], [[4, 5, 0], [6, 7, 1], [2]], [[1], [2, 3], [4, 0]], [[3], [4], [7, 6, 5]]],
)


@pytest.fixture(scope="module")
def lm():
    sizes = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 32}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
    return HuggingFaceLM(build(transformers.GPTNeoXConfig(**sizes, **shape), Rng(0)), eos=0)


@pytest.fixture(scope="module")
def tokenizer():
    return words_tokenizer()


def words_tokenizer():
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")
    return Tokenizer(tokenizers.Tokenizer(words), eos=0)


def ngrams():
    stream = np.array([1, 2, 3, 0, 4, 5, 6, 7, 0, 1, 2, 4, 5, 0] * 3)
    return NgramFeatures(NgramEnergy(order=3), NgramTables.fit(stream, vocab_size=V, eos=0, order=3))


def second(lm):
    """Another network of the same tokens, in a folder that stays for this test."""
    folder = tempfile.mkdtemp()
    tiny_network("GPT2", vocab_size=V).save_pretrained(folder)
    settings = SecondLMEnergy(path=folder)
    return SecondLM(settings, lm, second_model(settings, words_tokenizer()))


ROWS = {
    "unit": (Unit, lambda lm: Unit(UnitEnergy(), lm)),
    "unit, sum over all": (Unit, lambda lm: Unit(UnitEnergy(pool="sum", over="all"), lm)),
    "bit": (Bit, lambda lm: Bit.from_base(BitEnergy(), lm)),
    "bit, prefix once": (Bit, lambda lm: Bit.from_base(BitEnergy(prefix_once=True, over="all"), lm)),
    "logits": (Logits, lambda lm: Logits(LogitsEnergy(), lm)),
    "log-ratio": (LogRatio, lambda lm: LogRatio(LogRatioEnergy(), lm)),
    "probe": (Probe, lambda lm: Probe(ProbeEnergy(), lm)),
    "probe, statistics alone": (Probe, lambda lm: Probe(ProbeEnergy(states=False), lm)),
    "ngram": (NgramFeatures, lambda lm: ngrams()),
    "repetition": (Repetition, lambda lm: Repetition(RepetitionEnergy(), torch.arange(V))),
    "second-lm": (SecondLM, second),
    "product": (Product, lambda lm: Product([ngrams(), Unit(UnitEnergy(), lm)], frozen=[True, False])),
}


@pytest.mark.parametrize("name", ROWS)
def test_contract(name, lm, tokenizer, tmp_path):
    energy = ROWS[name][1](lm).eval()
    if name != "logits":  # which has no start: the base has learned it
        at_start = energy(X).abs().max()
        assert at_start <= (1e-6 if name == "log-ratio" else 0), "E is not 0 at the start"  # but for rounding
    with torch.no_grad():
        for i, weight in enumerate(energy.parameters()):
            weight.add_(0.1 * Rng(1).child(i).normal(*weight.shape))
    assert energy(X).std() > 0, "the energy does not depend on its weights"
    check_energy(energy, X, tolerance=1e-5 * (1 + energy(X).abs().max().item()))
    energy.save_pretrained(tmp_path / "energy")
    again = load_energy(tmp_path / "energy", base=lm, tokenizer=tokenizer)
    assert type(again) is ROWS[name][0]
    assert torch.equal(again(X), energy(X))
    suffixes = {path.suffix for path in (tmp_path / "energy").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors"}


def test_every_public_energy_has_a_row():
    public = {getattr(freenergy, name) for name in freenergy.__all__ if not name.startswith("_")}
    energies = {each for each in public if isinstance(each, type) and issubclass(each, torch.nn.Module)}
    assert energies == {row[0] for row in ROWS.values()}


@pytest.mark.parametrize("fault", ["batch", "padding", "order", "random", "shape"])
def test_the_contract_finds_a_mutant(fault):
    def energy(x):
        value = x.lengths.double()
        if fault == "batch":
            value = value * x.shape[0]
        if fault == "padding":
            value = value + x.tokens.shape[2]
        if fault == "order":
            value = value + torch.arange(x.shape[1])
        if fault == "random":
            value = value + torch.rand(x.shape)
        return value[:, :1] if fault == "shape" else value

    check_energy(lambda x: x.lengths.double(), X)
    with pytest.raises(AssertionError):
        check_energy(energy, X)
