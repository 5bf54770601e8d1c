"""The tokens of continuations as they stand after a prefix.

    c = encode(prefix),     c x = encode(prefix + text)  or x = encode(text) where the tokenizer joins across the border

All continuations of a list have to share their context c, or Z(c) would not cancel between them. White space at the end
of the prefix goes over to the continuations where that keeps more of them whole: byte-level vocabularies put a space
before a word, so "Once upon a " and "time" are one text cut in the wrong place.
"""

from collections.abc import Sequence
from typing import NamedTuple

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance
from freenergy.corpus.tokenizer import Tokenizer


class JoinedText(NamedTuple):
    """One continuation: its tokens, and notes on them."""

    tokens: list[int]
    is_apart: bool = False  # encoded without its prefix
    reads_as: str | None = None  # what the tokens spell, where that is not the text


class Joined(NamedTuple):
    """A context and its continuations."""

    context: list[int]
    texts: tuple[JoinedText, ...]


def join(
    tokenizer: Tokenizer, prefix: str, texts: Sequence[str], *, end: Sequence[int] = (), advance: Advance | None = None
) -> Joined:
    """Encode texts as continuations of one prefix; ``end`` are tokens to put after each, such as EOS."""
    for i, text in enumerate(texts):
        if not text:
            raise UserError(f"candidate {i + 1} is empty, which compares with nothing: give it text or leave it out")
    starts = dict.fromkeys((prefix, prefix.rstrip()))
    ways = [_encoded(tokenizer, start, prefix[len(start) :], texts, end, advance) for start in starts]
    return min(ways, key=lambda way: sum(text.is_apart for text in way.texts))  # the first of equals: as it was given


def _encoded(
    tokenizer: Tokenizer, prefix: str, border: str, texts: Sequence[str], end: Sequence[int], advance: Advance | None
) -> Joined:
    context, found = tokenizer.encode(prefix), []
    for i, text in enumerate(texts):
        one = encode_after(tokenizer, context, prefix, border + text)
        if not one.tokens:
            raise UserError(
                f"candidate {i + 1} ({text[:40]!r}) has no tokens, which compares with nothing: give it some text or "
                "leave it out"
            )
        found.append(one._replace(tokens=[*one.tokens, *end]))
        if advance is not None:
            advance(1)
    return Joined(context, tuple(found))


def encode_after(tokenizer: Tokenizer, context: list[int], prefix: str, text: str) -> JoinedText:
    """Return a text after its prefix: cut from the tokens of both, or made without the prefix."""
    whole, P = tokenizer.encode(prefix + text), len(context)
    together = JoinedText(whole[P:], False, _misread(tokenizer, context, whole[P:], text))
    if whole[:P] == context and together.reads_as is None:
        return together
    alone = tokenizer.encode(text)
    if whole[:P] == context and whole[P:] == alone:  # lossy, but not at the border: unknown words
        return together
    return JoinedText(alone, True, _misread(tokenizer, context, alone, text))


def _misread(tokenizer: Tokenizer, context: list[int], tokens: list[int], text: str) -> str | None:
    """Return what tokens spell after their context, where that is not the text."""
    before, both = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
    reads = both[len(before) :] if both.startswith(before) else tokenizer.decode(tokens)
    return None if reads == text else reads
