"""Finds document boundaries in a stream of text, and cuts very long documents into pieces.

    fragments  t_1 t_2 … END t_k … END      →      pieces of at most 1 Mi characters, each marked first / last

A fragment is any part of a document; ``END`` closes the document. No step holds more than a piece of it. A longer
document is cut before white space that follows a word character, a newline where there is one: there every common
pre-tokenizer begins a new word anyway, so the tokens are like those of the uncut text.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import regex

from freenergy.core.errors import UserError
from freenergy.corpus.settings import CorpusSettings

PIECE: Final = 1 << 20  # characters
END: Final = None
_SEARCH_SECONDS = 1.0  # for a pattern on one line

Fragments = Iterator[str | None]


class DocumentPiece(NamedTuple):
    """A part of one document; most documents are a single piece, both first and last."""

    text: str
    is_first: bool
    is_last: bool


def split_documents(texts: Iterable[str], settings: CorpusSettings) -> Fragments:
    """Find the documents of a plain text file by the settings' rule."""
    if settings.document_start is not None:
        return _from_starts(texts, settings.document_start)
    return {"file": _whole, "line": _lines_apart, "paragraph": _paragraphs}[settings.documents](texts)


def lines(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    r"""Cut a stream of text into lines with their "\n", long ones into parts; and whether the part starts a line."""
    rest, begins = "", True
    for text in texts:
        *complete, rest = (rest + text).split("\n")
        for line in complete:
            yield line + "\n", begins
            begins = True
        if len(rest) > PIECE:
            yield rest, begins
            rest, begins = "", False
    if rest:
        yield rest, begins


def pieces(fragments: Fragments, size: int = PIECE) -> Iterator[DocumentPiece]:
    """Join fragments into pieces of at most ``size`` characters; blank documents are left out."""
    held: list[str] = []
    length, is_first = 0, True
    for fragment in fragments:
        if fragment is END:
            text = "".join(held)
            if not is_first or not _is_blank(text):
                yield DocumentPiece(text, is_first, True)
            held, length, is_first = [], 0, True
            continue
        held.append(fragment)
        length += len(fragment)
        if length > size:
            *cut, text = _cut(held, size)
            for part in cut:
                if is_first and _is_blank(part):
                    continue  # leading blanks are dropped, however many megabytes
                yield DocumentPiece(part, is_first, False)
                is_first = False
            held, length = [text], len(text)


def _cut(held: list[str], size: int) -> list[str]:
    """Parts of at most ``size`` characters; the cuts depend on the text alone, not on how it arrived."""
    text, start, parts = "".join(held), 0, []
    while len(text) - start > size:
        stop = _cut_before(text, start, start + size)
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


def _cut_before(text: str, start: int, stop: int) -> int:
    half = (start + stop) // 2
    for mark in ("\n", " "):
        i = text.rfind(mark, half, stop)
        while i > half:
            if text[i - 1].isalnum():
                return i
            i = text.rfind(mark, half, i)
    return stop


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _whole(texts: Iterable[str]) -> Fragments:
    yield from texts
    yield END


def _lines_apart(texts: Iterable[str]) -> Fragments:
    for line, _ in lines(texts):
        yield line.removesuffix("\n")
        if line.endswith("\n"):
            yield END
    yield END


def _paragraphs(texts: Iterable[str]) -> Fragments:
    """Documents between blank lines, without the newline at their end."""
    newline = ""
    for line, begins in lines(texts):
        if begins and _is_blank(line):
            yield END
            newline = ""
        else:
            yield newline + line.removesuffix("\n")
            newline = "\n" if line.endswith("\n") else ""
    yield END


def _from_starts(texts: Iterable[str], pattern: str) -> Fragments:
    """Documents from each line that the pattern is found in; one that takes for ever on a line is refused."""
    start = regex.compile(pattern)
    for line, begins in lines(texts):
        try:
            is_start = begins and start.search(line, timeout=_SEARCH_SECONDS) is not None
        except TimeoutError:
            raise UserError(
                f"corpus.document_start {pattern!r} takes more than {_SEARCH_SECONDS:g} seconds on the line "
                f"{line[:40]!r}: write it without nested repetitions"
            ) from None
        if is_start:
            yield END
        yield line
    yield END
