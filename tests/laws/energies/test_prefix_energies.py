"""Where the energy rises: the differences of a plain loop, and text that is cut between characters."""

import math

import pytest
import tokenizers
import torch

from freenergy import Rng, UserError
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.prefix_energies import energies_of_beginnings, pieces, rising


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte; 256 ends a document."""
    vocabulary = {char: i for i, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<end>"] = 256
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, 256)


def curved(x):
    """Depends on every token, the length and the context."""
    values = torch.where(x.mask, x.tokens, 0).double()
    return (values * torch.arange(1.0, x.tokens.shape[2] + 1)).sum(-1).sqrt() + 0.1 * x.contexts.lengths.unsqueeze(1)


def test_the_energies_are_those_of_each_beginning_alone():
    x, context = Rng(3).uniform(17).mul(200).long().tolist(), [5, 6, 7]
    alone = [float(curved(Continuations.from_lists([context], [[x[:t]]]))) for t in range(1, len(x) + 1)]
    for rows in (1, 4, 256):
        assert energies_of_beginnings(curved, context, x, rows=rows).tolist() == pytest.approx(alone, abs=1e-12)


def test_the_rises_add_up(tokenizer):
    x = tokenizer.encode("a plain text")
    found = rising(curved, tokenizer, [1], x)
    assert "".join(piece.text for piece in found) == "a plain text"
    assert found[0].rise is None
    whole = float(curved(Continuations.from_lists([[1]], [[x]])))
    assert sum(piece.rise for piece in found[1:]) == pytest.approx(whole - found[0].energy)
    assert found[-1].energy == pytest.approx(whole)
    second = curved(Continuations.from_lists([[1]], [[x[:1], x[:2]]]))[0]
    assert found[1].rise == pytest.approx(float(second[1] - second[0]))


def test_characters_of_several_tokens_stay_whole(tokenizer):
    text = "né 漢 \N{GRINNING FACE}!"
    x = tokenizer.encode(text)
    assert len(x) == len(text.encode())
    found = rising(curved, tokenizer, [], x)
    assert [piece.text for piece in found] == list(text)
    assert [len(piece.tokens) for piece in found] == [len(char.encode()) for char in text]
    assert sum(piece.rise for piece in found[1:]) == pytest.approx(found[-1].energy - found[0].energy)


def test_a_text_that_ends_inside_a_character_loses_no_token(tokenizer):
    x = tokenizer.encode("a漢")[:-1]
    found = pieces(tokenizer, x)
    assert found[-1][0] == len(x)
    assert found[0] == (1, "a")
    assert "\N{REPLACEMENT CHARACTER}" in found[-1][1]


def test_the_end_of_a_document_is_a_piece_without_text(tokenizer):
    found = rising(curved, tokenizer, [], [*tokenizer.encode("ab"), 256])
    assert [piece.text for piece in found] == ["a", "b", ""]
    assert found[-1].rise > 0


def test_forbidden_beginnings_have_no_rise(tokenizer):
    def forbids(x):
        return torch.where((x.tokens == tokenizer.encode("b")[0]).any(-1), torch.inf, x.lengths.double())

    found = rising(forbids, tokenizer, [], tokenizer.encode("aabc"))
    assert [piece.rise for piece in found] == [None, 1.0, None, None]
    assert math.isinf(found[-1].energy)
    assert found[-1].to_json() == {"text": "c", "tokens": 1, "energy": None, "rise": None}


def test_nothing_to_look_at_is_one_sentence(tokenizer):
    with pytest.raises(UserError, match="no text to read"):
        rising(curved, tokenizer, [1], [])
