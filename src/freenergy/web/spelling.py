"""Tokens as text: how each is spelled, at which offset, and how much of a growing text may be shown.

A token can be part of a character. Then it is spelled by its bytes, and a text that ends with it is shown up to the
character before, until the rest has come. Likewise a text that ends like the beginning of a stop string waits.
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from freenergy.corpus import Tokenizer
from freenergy.lm.token_log_probs import TokenLogProbs

_LOWEST = -9999.0  # what the dialect writes for minus infinity
_UNKNOWN = "\ufffd"


@final
class Spelling:
    """Spells the tokens of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self._bytes = tokenizer, tokenizer.bytes_of_tokens

    def token(self, token: int, *, as_id: bool = False) -> str:
        """Return a token by itself: as text, by its bytes if they are not UTF-8, by its id if it is empty."""
        raw = None if self._bytes is None or token >= len(self._bytes) else self._bytes[token]
        text = self.tokenizer.decode([token]) if raw is None else raw.decode("utf-8", "replace")
        if as_id or not text:
            return f"token_id:{token}"
        if raw is not None and _UNKNOWN in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return where each token begins in the text of them all, in characters."""
        if self._bytes is None or any(token >= len(self._bytes) for token in tokens):
            return [len(self.tokenizer.decode(tokens[:t])) for t in range(len(tokens))]
        decoder, places, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        for token in tokens:
            places.append(length)
            length += len(decoder.decode(self._bytes[token]))
        return places


@final
@dataclass(slots=True)
class Growing:
    """A growing text; ``add`` returns what of it can be shown."""

    tokenizer: Tokenizer
    stops: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    shown: str = ""
    stopped_by: str | None = None

    def add(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """Return the new part of the text that cannot change any more; all of it at the end."""
        if self.stopped_by is not None:
            return ""
        self.tokens += tokens
        whole = self.tokenizer.decode(self.tokens)
        found = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in whole]
        if found:  # the stop string that was complete first, however the tokens arrived
            end, _, self.stopped_by = min(found)
            safe = whole[: end - len(self.stopped_by)]
        else:
            safe = whole if is_last else self._certain(whole)
        new, self.shown = safe[len(self.shown) :], safe
        return new

    def _certain(self, whole: str) -> str:
        """Return the text without an end that may become another character or a stop string."""
        safe = whole.rstrip(_UNKNOWN)
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for size in range(min(longest, len(safe)), 0, -1):
            if any(stop.startswith(safe[-size:]) for stop in self.stops):
                return safe[:-size]
        return safe


def num_kept(offsets: Sequence[int], growing: Growing) -> int:
    """Return how many tokens of a text belong to what is shown of it: all, unless a stop string cut it."""
    if growing.stopped_by is None:
        return len(offsets)
    return sum(place < len(growing.shown) for place in offsets)


class Place(NamedTuple):
    """A token, its log-probability and the likeliest tokens at its position; None at the very first token."""

    token: int
    log_prob: float | None
    top: tuple[tuple[int, float], ...]


def places(tokens: Sequence[int], found: TokenLogProbs, b: int, n: int) -> list[Place]:
    """Return what was found of the tokens of continuation n of context b."""
    columns = (column[b, n, : len(tokens)].tolist() for column in (found.log_prob, found.top, found.log_top))
    rows = zip(tokens, *columns, strict=True)
    return [Place(token, p, tuple(zip(top, log_top, strict=True))) for token, p, top, log_top in rows]


def log_probs(spelling: Spelling, places: Sequence[Place], offsets: Sequence[int], *, as_ids: bool) -> dict[str, Any]:
    """Return the dialect's ``logprobs``; a token's own log-probability is in its list in any case."""
    tops = [
        None
        if place.log_prob is None
        else {
            spelling.token(token, as_id=as_ids): _number(p) for token, p in (*place.top, (place.token, place.log_prob))
        }
        for place in places
    ]
    return {
        "tokens": [spelling.token(place.token, as_id=as_ids) for place in places],
        "token_logprobs": [None if place.log_prob is None else _number(place.log_prob) for place in places],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _number(value: float) -> float:
    return min(value, 0.0) if math.isfinite(value) else _LOWEST
