import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer, WordTokenizer, count_words_and_bytes
from freenergy.corpus.tokenizer import learn


def adjacent(ids, prefix, length):
    """Continuations that tile a text, each with the tokens before it; the first has none."""
    starts = range(0, len(ids), length)
    contexts = [ids[max(0, start - prefix) : start] for start in starts]
    return Continuations.from_lists(contexts, [[ids[start : start + length]] for start in starts])


texts = st.text(alphabet="ab é猫😀\u00a0\u3000 \n.", min_size=1, max_size=60)


@given(text=texts, length=st.integers(1, 9))
@settings(deadline=None)
def test_adjacent_windows_count_every_word_and_byte_once(tokenizer, text, length):
    x = adjacent(tokenizer.encode(text), 20, length)
    assert count_words_and_bytes(tokenizer, x) == (len(text.split()), len(text.encode()))


@given(text=texts.filter(lambda text: text.strip()), length=st.integers(1, 9))
@settings(deadline=None)
def test_words_between_spaces(text, length):
    words = learn(WordTokenizer(), [text])
    x = adjacent(words.encode(text), 20, length)
    plain = " ".join(text.split())
    assert count_words_and_bytes(words, x) == (len(text.split()), len(plain.encode()))


def test_a_word_that_began_in_the_prefix_is_not_counted(tokenizer):
    ids = tokenizer.encode("one tw")
    more = tokenizer.encode("o three")
    assert count_words_and_bytes(tokenizer, Continuations.from_lists([ids], [[more]])) == (1, 7)
    assert count_words_and_bytes(tokenizer, Continuations.from_lists([[]], [[more]])) == (2, 7)


def test_eos_is_no_text_and_candidates_add_up(tokenizer):
    a, b = tokenizer.encode(" one"), [*tokenizer.encode(" two é"), tokenizer.eos]
    x = Continuations.from_lists([tokenizer.encode("x")], [[a, b]])
    assert count_words_and_bytes(tokenizer, x) == (3, 4 + 7)


def test_other_vocabularies_are_decoded():
    """Metaspace as in SentencePiece checkpoints: no byte table, so differences of decoded text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<s>", "▁", "a", "b", "▁a", "é"]
    inner = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    loaded = Tokenizer(inner, 0)
    assert loaded.bytes_of_tokens is None
    text = "ab aé bb a"
    for length in range(1, 6):
        assert count_words_and_bytes(loaded, adjacent(loaded.encode(text), 20, length)) == (4, len(text.encode()))


def test_shapes_of_nothing(tokenizer):
    assert count_words_and_bytes(tokenizer, Continuations.from_lists([], [])) == pytest.approx((0, 0))
