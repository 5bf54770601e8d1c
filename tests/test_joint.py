"""The joint model against enumeration, and the pair on disk."""

import numpy as np
import pytest
import tokenizers
import torch

from freenergy import (
    Continuations,
    JointModel,
    NgramFeatures,
    NgramLM,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Tokenizer,
    UserError,
)
from freenergy.energies.ngram_tables import NgramTables
from freenergy.energies.settings import NgramEnergy

SPACE = SequenceSpace(vocab_size=3, length=3, eos=0)


@pytest.fixture
def tokenizer():
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(4)}, unk_token="w0")
    return Tokenizer(tokenizers.Tokenizer(words), eos=0)


def everything(contexts):
    strings, B = SPACE.enumerate(), len(contexts)
    tokens, lengths = strings.tokens.expand(B, -1, -1), strings.lengths.expand(B, -1)
    return Continuations(Sequences.from_lists(contexts), tokens, lengths)


def energy(x):
    return (x.tokens == 1).double().sum(-1) - 0.5 * x.lengths


def test_log_score_is_the_joint_up_to_log_z():
    """P = softmax of log_score over the whole space; E + 1000 moves log Z by −1000 and no probability."""
    lm = TabularLM.random(Rng(1), vocab_size=3, order=1)
    x = everything([[1, 2], [2]])
    log_score = JointModel(lm, energy).log_score(x)
    p = lm.log_prob(x).exp() * (-energy(x)).exp()
    torch.testing.assert_close(log_score.softmax(-1), p / p.sum(-1, keepdim=True), atol=1e-12, rtol=0)
    moved = JointModel(lm, lambda x: energy(x) + 1000).log_score(x)
    torch.testing.assert_close(moved.logsumexp(-1), log_score.logsumexp(-1) - 1000, atol=1e-9, rtol=0)
    torch.testing.assert_close(moved.softmax(-1), log_score.softmax(-1), atol=1e-10, rtol=0)


def test_an_energy_of_zero_leaves_the_base():
    lm = TabularLM.random(Rng(1), vocab_size=3, order=1)
    x = everything([[1]])
    assert torch.equal(JointModel(lm, lambda x: torch.zeros(x.shape)).log_score(x), lm.log_prob(x))


def test_the_pair_on_disk(tmp_path, tokenizer):
    stream = np.array([1, 2, 3, 0, 1, 2, 0, 3, 3, 1, 0] * 4)
    lm = NgramLM.fit(stream, vocab_size=4, eos=0, order=2, tokenizer=tokenizer.fingerprint)
    features = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=4, eos=0, order=2))
    with torch.no_grad():
        features.weight.normal_(generator=torch.Generator().manual_seed(0))
    joint = JointModel(lm, features, tokenizer)
    joint.save_pretrained(tmp_path / "pair", facts={"gain": {"percent": 12.345678}})
    again = JointModel.from_pretrained(tmp_path / "pair")
    x = Continuations.from_lists([[1, 2]], [[[3, 0], [2, 2, 1]]])
    assert torch.equal(again.log_score(x), joint.log_score(x))
    card = (tmp_path / "pair" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: freenergy")
    assert "percent: 12.35" in card


def test_what_cannot_be_saved_or_loaded_is_one_sentence(tmp_path, tokenizer):
    lm = TabularLM.random(Rng(1), vocab_size=4, order=1)
    with pytest.raises(UserError, match="has no tokenizer"):
        JointModel(lm, energy).save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="the energy function has no save_pretrained"):
        JointModel(lm, energy, tokenizer).save_pretrained(tmp_path / "a")
    features = NgramFeatures(
        NgramEnergy(order=1), NgramTables.fit(np.array([1, 0, 2, 0, 3, 3, 0]), vocab_size=4, eos=0, order=1)
    )
    with pytest.raises(UserError, match="a base of class TabularLM cannot be saved"):
        JointModel(lm, features, tokenizer).save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="there is no joint model in"):
        JointModel.from_pretrained(tmp_path / "nowhere")
    assert not (tmp_path / "a").exists()
