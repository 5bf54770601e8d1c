"""Counts the words and bytes that a continuation adds to its prefix, for perplexity per word and per byte.

    words(x | c) = W(c x) − W(c),      bytes(x | c) = |c x| − |c|

W counts the words that have begun, so adjacent windows of a text count each of its words and bytes once. For byte-level
vocabularies everything is done on the tokens' own bytes: a character cut by the window's edge counts where its last
byte is. Only the end of the prefix is read; without a prefix a continuation is taken to begin a word.
"""

import codecs
from collections.abc import Callable, Sequence

from freenergy.core.sequences import Continuations
from freenergy.corpus.tokenizer import Tokenizer

_TAIL = 16  # tokens of the prefix: enough bytes for a whole character before the continuation


def count_words_and_bytes(tokenizer: Tokenizer, x: Continuations) -> tuple[int, int]:
    """Return the number of words that start in the continuations, and of their UTF-8 bytes; EOS is not text."""
    measure = _measure(tokenizer)
    words = size = 0
    for context, continuations in zip(x.contexts.lists(), x.lists(), strict=True):
        tail = context[-_TAIL:]
        words_before, size_before = measure(tail)
        for continuation in continuations:
            words_after, size_after = measure(tail + continuation)
            words += words_after - words_before
            size += size_after - size_before
    return words, size


def _measure(tokenizer: Tokenizer) -> Callable[[Sequence[int]], tuple[int, int]]:
    table = tokenizer.bytes_of_tokens

    def measure(ids: Sequence[int]) -> tuple[int, int]:
        data = tokenizer.decode(ids).encode() if table is None else b"".join([table[i] for i in ids])
        # not final: bytes of an unfinished character at the end wait for the rest of it
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        return len(text.split()), len(data)

    return measure
