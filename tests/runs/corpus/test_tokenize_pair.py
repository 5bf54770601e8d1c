"""Continuations after a prefix: the tokens of the whole text where they can be had, and a flag where not."""

import pytest
import tokenizers

from freenergy.core.errors import UserError
from freenergy.corpus import Tokenizer
from freenergy.corpus.tokenize_pair import join


@pytest.fixture(scope="module")
def words():
    """Words between white space; what is not known is <unk>."""
    model = tokenizers.models.WordLevel({"<end>": 0, "<unk>": 1, "a": 2, "b": 3, "ab": 4}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, eos=0)


def test_the_tokens_are_those_of_the_whole_text(tokenizer, make_text):
    """At every word border of a text, prefix and continuation give the tokens of the whole."""
    text = make_text(3, 40)
    places = [i for i, char in enumerate(text) if char.isspace() and text[i - 1].isalnum() and text[i + 1].isalnum()]
    assert len(places) > 10
    for i in places:
        joined = join(tokenizer, text[:i], [text[i:]])
        assert joined.context == tokenizer.encode(text[:i])
        assert joined.context + joined.texts[0].tokens == tokenizer.encode(text)
        assert not joined.texts[0].is_apart
        assert joined.texts[0].reads_as is None


def test_a_space_at_the_border_goes_over_to_the_continuations(tokenizer):
    """ "the " + "cat" is "the" + " cat": the tokenizer has a token for " cat" and none of the texts is apart."""
    given, meant = join(tokenizer, "the ", ["cat", "mat"]), join(tokenizer, "the", [" cat", " mat"])
    assert given == meant
    assert not any(text.is_apart for text in given.texts)


def test_a_prefix_that_fits_as_it_is_keeps_its_space(words):
    """White space is no token here, so there is nothing to hand over; and 'a ' reads as 'a'."""
    assert join(words, "a ", ["b"]).context == [2]
    vocabulary = {"<end>": 0, "a": 1, "\n": 2, "b": 3}
    newline = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    newline.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")
    found = join(Tokenizer(newline, eos=0), "a\n", ["b"])
    assert (found.context, found.texts[0].tokens) == ([1, 2], [3])


def test_a_border_inside_a_word_is_told(words):
    """ "a" + "b" is the one word "ab": all candidates still have the context a."""
    joined = join(words, "a", ["b", " b"])
    assert joined.context == [2]
    assert [text.tokens for text in joined.texts] == [[3], [3]]
    assert [text.is_apart for text in joined.texts] == [True, False]
    assert [text.reads_as for text in joined.texts] == [" b", None]


def test_an_unknown_word_at_the_border_swallows_nothing(words):
    """ "zebra" + "b" is one unknown word, as "zebra" alone is: the tokens agree and b would be lost."""
    joined = join(words, "zebra", ["b a", " b a"])
    assert [text.tokens for text in joined.texts] == [[3, 2], [3, 2]]
    assert [text.is_apart for text in joined.texts] == [True, False]


def test_tokens_that_read_differently_are_told(words, tokenizer):
    joined = join(words, "a", [" b zebra", " b"])
    assert [text.reads_as for text in joined.texts] == [" b <unk>", None]
    assert join(words, "zebra", [" b"]).texts[0].reads_as is None  # the prefix is lost, not the candidate
    assert [text.reads_as for text in join(tokenizer, "the", [" 猫", " naïve 🙂"]).texts] == [None, None]


def test_an_empty_prefix_begins_a_document(tokenizer):
    joined = join(tokenizer, "", ["the cat", " the"])
    assert joined.context == []
    assert joined.texts[0].tokens == tokenizer.encode("the cat")


def test_ends(tokenizer):
    plain, ended = join(tokenizer, "the", [" cat"]), join(tokenizer, "the", [" cat"], end=[tokenizer.eos])
    assert ended.texts[0].tokens == [*plain.texts[0].tokens, tokenizer.eos]
    assert ended.texts[0].reads_as is None


def test_nothing_to_compare_is_refused(words):
    with pytest.raises(UserError, match=r"^candidate 2 is empty, which compares with nothing: give it text"):
        join(words, "a", ["b", ""])
    with pytest.raises(UserError, match=r"^candidate 1 \('  '\) has no tokens"):
        join(words, "a", ["  "])
