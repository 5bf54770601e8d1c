"""Feature templates of a classic CRF.

    "w[-1]|w[0]"      the last word and this one, together: one attribute of the position
    NAME[offset]      NAME: w (word), lower, shape, prefix1 … prefix5, suffix1 … suffix5, c0, c1, … (columns)
    "bias"            an attribute that every position has

Each attribute that is seen has a weight for each tag that it is seen with. Places outside of a sentence have no
attributes. Presets name lists: ``chunking`` is the list that CRFsuite's example for CoNLL-2000 has.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from freenergy.core.errors import UserError
from freenergy.tagging.sentences import Sentence

_PART = re.compile(r"(w|lower|shape|prefix[1-5]|suffix[1-5]|c\d)\[(-?\d)\]")
_BIAS = "bias"
PRESETS: dict[str, tuple[str, ...]] = {
    "chunking": (
        "w[-2]", "w[-1]", "w[0]", "w[1]", "w[2]", "w[-1]|w[0]", "w[0]|w[1]",
        "c0[-2]", "c0[-1]", "c0[0]", "c0[1]", "c0[2]", "c0[-2]|c0[-1]", "c0[-1]|c0[0]", "c0[0]|c0[1]", "c0[1]|c0[2]",
        "c0[-2]|c0[-1]|c0[0]", "c0[-1]|c0[0]|c0[1]", "c0[0]|c0[1]|c0[2]",
    ),
    "words": (
        _BIAS, "lower[-1]", "w[0]", "lower[0]", "lower[1]", "lower[-1]|lower[0]", "lower[0]|lower[1]",
        "shape[-1]", "shape[0]", "shape[1]", "prefix1[0]", "prefix2[0]", "prefix3[0]", "suffix1[0]", "suffix2[0]",
        "suffix3[0]", "suffix4[0]", "suffix3[-1]", "suffix3[1]", "shape[-1]|shape[0]", "shape[0]|shape[1]",
    ),
}  # fmt: skip


class Part(NamedTuple):
    """What is taken from the word at an offset."""

    name: str
    offset: int


def parse(templates: Sequence[str]) -> dict[str, tuple[Part, ...]]:
    """Returns the parts of each template; presets are written out.

    >>> parse(["w[-1]|w[0]"])
    {'w[-1]|w[0]': (Part(name='w', offset=-1), Part(name='w', offset=0))}
    """
    written = [one for each in templates for one in PRESETS.get(each, (each,))]
    found = dict[str, tuple[Part, ...]]()
    for template in written:
        matches = [_PART.fullmatch(part) for part in template.split("|")] if template != _BIAS else []
        if None in matches:
            raise UserError(
                f"the template {template!r} cannot be read: write it as in w[-1]|w[0], with w, lower, shape, prefix1 … "
                f"5, suffix1 … 5 or c0 … c9, or name one of {', '.join(PRESETS)}"
            )
        found[template] = tuple(Part(match[1], int(match[2])) for match in matches if match is not None)
    return found


def shape_of(word: str) -> str:
    """Returns the shape of a word: X, x, 9 for letters and digits, runs of more than two cut.

    >>> shape_of("McDonald's"), shape_of("1,234")
    ('XxXxx-x', '9-99')
    """
    found = ""
    for letter in word[:40]:
        kind = "X" if letter.isupper() else "x" if letter.isalpha() else "9" if letter.isdigit() else "-"
        if found[-2:] != kind * 2:
            found += kind
    return found


def _view(name: str, sentence: Sentence) -> list[str]:
    """Returns what a part takes from each word."""
    words = sentence.words
    match name[0]:
        case "w":
            return list(words)
        case "l":
            return [word.lower() for word in words]
        case "p":
            return [word[: int(name[-1])] for word in words]
        case "s" if name != "shape":
            return [word[-int(name[-1]) :] for word in words]
        case "s":
            return [shape_of(word) for word in words]
    column = int(name[1:])
    if not sentence.columns or len(sentence.columns[0]) <= column:
        raise UserError(
            f"a template reads column {name}, which the sentences lack: set data.columns, or take other templates"
        )
    return [each[column] for each in sentence.columns]


def attributes(sentence: Sentence, templates: dict[str, tuple[Part, ...]]) -> Iterator[list[str]]:
    """Yields the attributes of each word."""
    views = {part.name: _view(part.name, sentence) for parts in templates.values() for part in parts}
    T = len(sentence)
    for t in range(T):
        found = []
        for template, parts in templates.items():
            if all(0 <= t + part.offset < T for part in parts):
                found.append(template + "=" + "|".join(views[part.name][t + part.offset] for part in parts))
        yield found
