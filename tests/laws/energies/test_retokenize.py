"""From the tokens of the corpus, through text, to the tokens of an encoder: what belongs to what, and what is lost."""

import os
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from freenergy import Continuations, UserError
from freenergy.corpus import Tokenizer
from freenergy.corpus.resources import is_cached, locate
from freenergy.corpus.tokenizer import byte_alphabet
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.retokenize import NOT_INVERTIBLE, NOT_UTF8, UNKNOWN, Crossing

EOS, CLS, SEP, UNK = 0, 2, 3, 1
LETTERS = "abcdefghijklmnopqrstuvwxyz[].,"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "there", "cat", "##at", *LETTERS, *("##" + c for c in LETTERS)]


def bytes_tokenizer():
    """Token b + 1 is byte b; 257 is "the"; token 0 ends a document."""
    alphabet = {char: byte[0] + 1 for char, byte in byte_alphabet().items()}
    merges = [("t", "h"), ("th", "e")]
    vocabulary = {"<eos>": 0} | alphabet | {"the": 257, "th": 258}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner, eos=EOS)


def words_tokenizer():
    inner = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<unk>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner, eos=inner.token_to_id("<eos>"))


def crossing(corpus=None):
    inner = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return Crossing(corpus or bytes_tokenizer(), inner, cls=CLS, sep=SEP, unk=UNK)


def raw(text):
    """One token a byte; "$" is EOS."""
    data = text if isinstance(text, bytes) else text.encode()
    return [EOS if byte == ord("$") else byte + 1 for byte in data]


def string(prefix, *continuations):
    return Continuations.from_lists([raw(prefix)], [[raw(x) for x in continuations]])


def pieces(crossed, n=0):
    """The encoder's tokens of one string, by what they belong to."""
    row = crossed.rows.lists()[n]
    marks = ["c" if c else "x" if x else "-" for c, x in zip(crossed.in_prefix[0, n], crossed.in_x[0, n], strict=True)]
    return [f"{mark} {PIECES[token]}" for token, mark in zip(row, marks, strict=False)]


def test_a_word_across_the_boundary_is_one_word_and_belongs_to_the_continuation():
    together = crossing().together(string("a the", "re cat"))
    assert pieces(together) == ["- [CLS]", "c a", "x there", "x cat", "- [SEP]"]
    assert together.losses == [frozenset()]


def test_apart_the_tokens_of_the_prefix_do_not_depend_on_the_continuation():
    apart = crossing().apart(string("a the", "re cat", " cat"))
    assert [PIECES[token] for token in apart.x.contexts.lists()[0]] == ["[CLS]", "a", "the"]
    assert apart.in_prefix.tolist() == [[False, True, True]]
    first, second = apart.x.lists()[0]
    assert [PIECES[token] for token in first] == ["r", "##e", "cat", "[SEP]"]
    assert [PIECES[token] for token in second] == ["cat", "[SEP]"]
    assert apart.in_x.tolist() == [[[True, True, True, False], [True, False, False, False]]]


def test_an_end_that_came_is_seen_and_the_frame_is_nobodys():
    together = crossing().together(string("a", " cat", " cat$", "$"))
    assert pieces(together, 0)[:4] == ["- [CLS]", "c a", "x cat", "- [SEP]"]
    assert pieces(together, 1) == ["- [CLS]", "c a", "x cat", "x [SEP]", "- [SEP]"]
    assert pieces(together, 2)[:4] == ["- [CLS]", "c a", "x [SEP]", "- [SEP]"]
    assert crossing().apart(string("a", " cat", " cat$")).in_x.sum(-1).tolist() == [[1, 2]]


def test_documents_are_read_each_on_its_own():
    """An EOS inside keeps "the" and "re" apart, and belongs to the part that it stands in."""
    together = crossing().together(string("the$the", "re$the"))
    wanted = ["- [CLS]", "c the", "c [SEP]", "x there", "x [SEP]", "x the", "- [SEP]"]
    assert pieces(together) == wanted
    apart = crossing().apart(string("the$the", "re$the"))
    assert [PIECES[token] for token in apart.x.contexts.lists()[0]] == ["[CLS]", "the", "[SEP]", "the"]
    assert [PIECES[token] for token in apart.x.lists()[0][0]] == ["r", "##e", "[SEP]", "the", "[SEP]"]


def test_text_that_spells_a_special_token_is_text():
    together = crossing().together(string("a", " [SEP]"))
    assert SEP not in together.rows.lists()[0][:-1]
    assert int(together.in_x.sum()) == 5  # [ s ##e ##p ]


def test_a_character_that_the_boundary_splits_belongs_to_the_continuation():
    data = "aé".encode()
    joint = crossing().together(string(data[:2], data[2:] + b" cat"))
    assert joint.losses == [frozenset()]
    assert pieces(joint) == ["- [CLS]", "c a", "x ##e", "x cat", "- [SEP]"]
    apart = crossing().apart(string(data[:2], data[2:], b"x"))
    assert [PIECES[token] for token in apart.x.contexts.lists()[0]] == ["[CLS]", "a"]
    assert apart.losses == [frozenset(), frozenset([NOT_UTF8, UNKNOWN])]


@pytest.mark.parametrize(
    ("prefix", "x", "losses"),
    [
        ("the", " cat", set()),
        ("the", " ☃", {UNKNOWN}),  # [UNK]
        ("☃", " cat", {UNKNOWN}),
        ("the", " c\x00at", {UNKNOWN}),  # dropped without a word by the encoder's normaliser
        ("the", b" \xff", {NOT_UTF8, UNKNOWN}),
        ("the", "\t\n cat", set()),  # white space is the encoder's reading
    ],
)
def test_losses(prefix, x, losses):
    for way in ("together", "apart"):
        assert getattr(crossing(), way)(string(prefix, x)).losses == [frozenset(losses)]


def test_a_corpus_of_words_crosses_by_its_decoder():
    corpus = words_tokenizer()
    x = Continuations.from_lists([[0]], [[[1], [1, corpus.eos], [2, 1]]])
    together = crossing(corpus).together(x)
    assert pieces(together, 0)[:4] == ["- [CLS]", "c the", "x cat", "- [SEP]"]
    assert pieces(together, 1)[:5] == ["- [CLS]", "c the", "x cat", "x [SEP]", "- [SEP]"]
    assert together.losses == [frozenset(), frozenset(), frozenset([UNKNOWN])]  # < and > are no pieces


def test_tokens_that_their_text_does_not_give_back_are_reported():
    inner = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "the cat": 2}, unk_token="the"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<eos>"])
    x = Continuations.from_lists([[0]], [[[1], [2]]])
    losses = crossing(Tokenizer(inner, eos=inner.token_to_id("<eos>"))).together(x).losses
    assert losses == [frozenset(), frozenset([NOT_INVERTIBLE])]


@given(st.text(alphabet="the ca☃é.", max_size=8), st.text(alphabet="the ca☃é.", max_size=8), st.booleans())
def test_the_encoder_reads_two_texts_however_they_were_cut_into_tokens(prefix, x, ended):
    """One token a byte against the tokenizer's own: the same rows, marks and losses, in both ways of crossing."""
    over = crossing()
    own = [over.corpus.encode(prefix), over.corpus.encode(x) + [EOS] * ended]
    other = [raw(prefix), raw(x) + [EOS] * ended]
    strings = [Continuations.from_lists([c], [[y]]) for c, y in (own, other)]
    first, second = (over.together(y) for y in strings)
    assert first.rows.lists() == second.rows.lists()
    assert torch.equal(first.in_x, second.in_x)
    assert first.losses == second.losses
    assert over.apart(strings[0]).x.lists() == over.apart(strings[1]).x.lists()


@given(st.text(alphabet="the cat.", max_size=10), st.text(alphabet="the cat.", max_size=10))
def test_marks_against_a_plain_reference(prefix, x):
    """A token belongs to x when it covers a character of x, and to the prefix otherwise."""
    over = crossing()
    together = over.together(Continuations.from_lists([raw(prefix)], [[raw(x)]]))
    encoding = over.encoder.encode(prefix + x, add_special_tokens=False)
    covers = [any(len(prefix) <= place < end for place in range(start, end)) for start, end in encoding.offsets]
    assert together.rows.lists() == [[CLS, *encoding.ids, SEP]]
    assert together.in_x[0, 0].tolist() == [False, *covers, False]
    assert together.in_prefix[0, 0].tolist() == [False, *(not c for c in covers), False]


def test_a_tokenizer_without_a_frame_is_one_sentence(tmp_path):
    bytes_tokenizer().save(tmp_path)
    with pytest.raises(UserError, match="names no cls_token or sep_token"):
        Crossing.from_folder(bytes_tokenizer(), tmp_path)


def test_a_real_encoder(monkeypatch):
    """MiniLM, where the user's cache has it: starts at 0, and nothing of plain text is lost."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "freenergy"
    monkeypatch.setenv("FREENERGY_CACHE", str(cache))
    if not is_cached("minilm-l6"):
        pytest.skip("minilm-l6 is not in the cache: freenergy fetches it when a recipe names it")
    energy = Bit.from_encoder(
        BitEnergy(start="encoder", encoder="minilm-l6"), locate("minilm-l6"), bytes_tokenizer()
    ).eval()
    x = string("The cat sat on the", " mat.", " mat and slept$")
    assert torch.equal(energy(x), torch.zeros(1, 2))
    assert not energy.lossy(x).any()
    assert energy.crossed == 2
