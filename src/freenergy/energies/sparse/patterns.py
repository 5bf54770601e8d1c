"""The patterns of Table 3.2 of Ou (2024), and their keys at every place of a text.

    w    (w₋₃ w₋₂ w₋₁ w₀) (w₋₂ w₋₁ w₀) (w₋₁ w₀) (w₀)            c    the same of classes
    ws   (w₋₃ w₀) (w₋₃ w₋₂ w₀) (w₋₃ w₋₁ w₀) (w₋₂ w₀)            cs   the same of classes
    wsh  (w₋₄ w₀) (w₋₅ w₀)                                       csh  the same of classes
    cpw  (c₋₃ c₋₂ c₋₁ w₀) (c₋₂ c₋₁ w₀) (c₋₁ w₀)                  a class predicts a word
    tied (w₋₉…₋₆ w₀) (c₋₉…₋₆ c₀)                                 four distances share one weight
    len  the number of words                                     the dimension features ν_l of Eq. 3.6

A place is a word w₀ of a sentence or the EOS behind it; the EOS before the sentence is at the offset before its first
word. With ``boundary = "none"`` patterns lie inside the words, as in the book.
"""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from jaxtyping import Int64, Integer

from freenergy.core.errors import UserError

Boundary = Literal["both", "none"]
NO_KEY = -1
_LARGEST_KEY = 2**63 - 1
Symbol = Literal["w", "c"]


@final
@dataclass(frozen=True, slots=True)
class Pattern:
    """Symbols at offsets behind a place, farthest first; the last is the place itself.

    ``offsets`` holds several choices where they share their weights.
    """

    symbols: tuple[Symbol, ...]
    offsets: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """The pattern as the book writes it."""
        return " or ".join(
            " ".join(f"{s}{-o}" for s, o in zip(self.symbols, each, strict=True)) for each in self.offsets
        )

    @property
    def reach(self) -> int:
        """How far behind its place a pattern looks."""
        return max(each[0] for each in self.offsets)


def _runs(symbols: str, *offsets: str) -> tuple[Pattern, ...]:
    """Make one pattern for each string of offsets, of one symbol or of one for the past and one for the place."""
    found = []
    for each in offsets:
        places = tuple(int(o) for o in each)
        past, now = symbols[0], symbols[-1]
        found.append(Pattern((*(past for _ in places[1:]), now), (places,)))  # type: ignore[arg-type]
    return tuple(found)


_GRAMS, _SKIPS, _HIGH = ("3210", "210", "10", "0"), ("30", "320", "310", "20"), ("40", "50")
_TIED = tuple((d, 0) for d in (6, 7, 8, 9))
LENGTH = "len"
TYPES: dict[str, tuple[Pattern, ...]] = {
    "w": _runs("w", *_GRAMS),
    "c": _runs("c", *_GRAMS),
    "ws": _runs("w", *_SKIPS),
    "cs": _runs("c", *_SKIPS),
    "wsh": _runs("w", *_HIGH),
    "csh": _runs("c", *_HIGH),
    "cpw": _runs("cw", *_GRAMS[:3]),
    "tied": (Pattern(("w", "w"), _TIED), Pattern(("c", "c"), _TIED)),
    LENGTH: (),
}


@final
class PatternText:
    """Sentences side by side, each followed by EOS, seen place by place.

    Places are numbered over the whole text; ``depth`` is how many tokens before a place belong to its sentence, the EOS
    that begins it among them.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " T"],
        bounds: Integer[np.ndarray, " bounds"],
        classes: Integer[np.ndarray, " V"],
        eos: int,
        boundary: Boundary = "both",
    ) -> None:
        V, C = len(classes), int(classes.max(initial=0)) + 1
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
            raise UserError(f"a token id is not below {V}: encode the text with the tokenizer of these features")
        if len(tokens) and (tokens[bounds[1:] - 1] != eos).any():
            raise UserError("a sentence does not end with EOS: end it, or leave sentences that were cut out")
        self.bounds = bounds.astype(np.int64)
        self.lengths = np.diff(self.bounds) - 1  # words
        self.sizes = {"w": V, "c": C}
        padded = np.concatenate([[eos], tokens]).astype(np.int64)
        self._of = {"w": padded, "c": classes.astype(np.int64)[padded]}
        self.depth = np.arange(len(tokens)) - np.repeat(self.bounds[:-1], np.diff(self.bounds)) + 1
        self.is_place = np.ones(len(tokens), dtype=bool) if boundary == "both" else tokens != eos
        self._inside = 0 if boundary == "both" else 1

    def keys(self, pattern: Pattern, offsets: tuple[int, ...]) -> Int64[np.ndarray, " T"]:
        """Return the key of the pattern at every place; −1 where the sentence has not enough tokens behind it."""
        check_size(pattern, self.sizes)
        key = np.zeros(len(self.depth), dtype=np.int64)
        for symbol, offset in zip(pattern.symbols, offsets, strict=True):
            values, size = self._of[symbol], self.sizes[symbol]
            key *= size
            start = max(0, offset - 1)
            key[start:] += values[start + 1 - offset : max(0, len(values) - offset)]
        key[(self.depth - self._inside < offsets[0]) | ~self.is_place] = NO_KEY
        return key


def check_size(pattern: Pattern, sizes: dict[str, int]) -> None:
    """Refuse a pattern with more possible keys than 64 bits can name."""
    possible = 1
    for symbol in pattern.symbols:
        possible *= sizes[symbol]
    if possible > _LARGEST_KEY:
        raise UserError(
            f"a vocabulary of {sizes['w']:,} words has too many patterns ({pattern.name}) to number: leave the types "
            "with four words out, or take a smaller vocabulary"
        )


def patterns_of(types: tuple[str, ...]) -> tuple[tuple[str, Pattern], ...]:
    """Return (type, pattern) of all types asked for, in the order of the table."""
    unknown = [each for each in types if each not in TYPES]
    if unknown or not types:
        raise UserError(f"features are {list(types)}: choose from {', '.join(TYPES)}")
    return tuple((name, pattern) for name in TYPES if name in types for pattern in TYPES[name])
