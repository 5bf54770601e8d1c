"""Spans: what a sequence of tags marks, by the conventions of seqeval and conlleval.

    tag = PREFIX-TYPE or O;      a span is (type, first, last)
    it begins at B and S, at I or E after O or another type;      it ends before O, B, S, another type, after E and S

The default of seqeval: tags that break their scheme still mark spans, as the perl script of CoNLL-2000 had it.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from freenergy.core.errors import UserError

Scheme = Literal["none", "bio", "bioes"]
_PREFIXES = frozenset("BIES")


class Span(NamedTuple):
    """Words ``first`` … ``last`` are one thing of this type."""

    type: str
    first: int
    last: int


def spans_of(tags: Sequence[str]) -> list[Span]:
    """Returns the spans that a sequence of tags marks.

    >>> spans_of(["B-NP", "I-NP", "B-NP", "O", "I-VP"])
    [Span(type='NP', first=0, last=1), Span(type='NP', first=2, last=2), Span(type='VP', first=4, last=4)]
    """
    found, first = list[Span](), 0
    before, kind = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, type_ = tag.partition("-")
        if _ends(before, prefix, kind, type_):
            found.append(Span(kind, first, place - 1))
        if _begins(before, prefix, kind, type_):
            first = place
        before, kind = prefix, type_
    return found


def _ends(before: str, prefix: str, kind: str, type_: str) -> bool:
    if before == "O":
        return False
    return before in ("E", "S") or prefix in ("B", "S", "O") or kind != type_


def _begins(before: str, prefix: str, kind: str, type_: str) -> bool:
    if prefix == "O":
        return False
    return prefix in ("B", "S") or before in ("E", "S", "O") or kind != type_


def has_spans(tags: Iterable[str]) -> bool:
    """Returns whether tags are of a scheme of spans: each is O or has a prefix B, I, E or S.

    >>> has_spans(["O", "B-NP"]), has_spans(["DET", "NOUN"])
    (True, False)
    """
    tags = set(tags)
    return bool(tags - {"O"}) and all(tag == "O" or (tag[:1] in _PREFIXES and tag[1:2] == "-") for tag in tags)


def in_scheme(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Returns tags that mark the same spans in a scheme; those of IOB1, IO and IOE are read as seqeval does.

    >>> in_scheme(["I-PER", "I-PER", "O", "I-LOC"], "bio")
    ['B-PER', 'I-PER', 'O', 'B-LOC']
    >>> in_scheme(["I-PER", "I-PER", "O", "I-LOC"], "bioes")
    ['B-PER', 'E-PER', 'O', 'S-LOC']
    """
    if scheme == "none":
        return list(tags)
    if not has_spans([*tags, "B-X"]):
        strange = next(tag for tag in tags if not has_spans([tag, "B-X"]))
        raise UserError(f'the tag {strange!r} marks no span: set data.scheme = "none", or fix the tags')
    found = ["O"] * len(tags)
    for span in spans_of(tags):
        for place in range(span.first, span.last + 1):
            prefix = "B" if place == span.first else "I"
            if scheme == "bioes" and place == span.last:
                prefix = "S" if place == span.first else "E"
            found[place] = f"{prefix}-{span.type}"
    return found
