"""Held-out windows that repeat what came before are no test: which of them to drop.

    h(i) = Σ_j m(x[i + j]) · b^(n − 1 − j)  mod 2^64,   j = 0 … n − 1      (hash of the n-gram at i; m mixes a token)
    drop window [s, e)   if some n-gram inside it occurs in an earlier split

The held-out n-grams are few, the training n-grams many: so the held-out hashes are sorted in memory and the training
stream passes by, through a table that turns most of it away. N-grams do not cross from one document into the next.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Integer

from freenergy.corpus.windows import Places
from freenergy.progress import Advance

_CHUNK = 1 << 20  # positions of the stream at a time
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token's share of the hash is lost
_MOST_FILTER_BITS = 26  # 64 MB, one byte an entry

Array = np.ndarray


@final
@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens and the bounds of their documents, EOS included."""

    tokens: Integer[np.ndarray, " tokens"]
    documents: Integer[np.ndarray, " bounds"]


def repeated(held_out: Stream, earlier: Iterable[Stream], n: int, advance: Advance) -> tuple[Array, float]:
    """For each position of the held-out stream, does its n-gram occur in an earlier stream? And the share that do."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *(h[inside] for h, inside in _hashes(held_out, n))])
    known = np.unique(hashes)
    seen = np.zeros(len(known), dtype=bool)
    for stream in earlier:
        _mark(known, seen, stream, n, advance)
    found = seen[np.searchsorted(known, hashes)] if len(known) else np.zeros(0, dtype=bool)
    places = np.zeros(len(held_out.tokens), dtype=bool)
    places[np.concatenate([inside for _, inside in _hashes(held_out, n)])] = found
    return places, float(found.mean()) if len(found) else 0.0


def touched(places: Bool[np.ndarray, " tokens"], windows: Places, prefix: int, n: int) -> Bool[np.ndarray, " windows"]:
    """Which windows hold a marked n-gram from its first token to its last."""
    before = np.concatenate([[0], np.cumsum(places, dtype=np.int64)])
    start = windows["start"]
    last = start + prefix + windows["length"] - n + 1  # one past the last place where an n-gram still fits
    return np.asarray(before[np.maximum(last, start)] > before[start])


def _mark(known: Array, seen: Array, stream: Stream, n: int, advance: Advance) -> None:
    bits = min(max(len(known).bit_length() + 3, 8), _MOST_FILTER_BITS)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, dtype=bool)
    table[known >> shift] = True
    for h, inside in _hashes(stream, n):
        advance(len(h))
        h = h[inside & table[h >> shift]]
        at = np.minimum(np.searchsorted(known, h), max(len(known) - 1, 0))
        seen[at[known[at] == h]] = True


def _hashes(stream: Stream, n: int) -> Iterator[tuple[Array, Array]]:
    """Hash of the n-gram at each position, chunk by chunk, and whether it lies inside one document."""
    total = len(stream.tokens)
    for first in range(0, total, _CHUNK):
        count = min(_CHUNK, total - first)
        mixed = _mix(np.asarray(stream.tokens[first : first + count + n - 1]))
        mixed = np.pad(mixed, (0, count + n - 1 - len(mixed)))
        h = np.zeros(count, dtype=np.uint64)
        for j in range(n):
            h *= _MULTIPLIER
            h += mixed[j : j + count]
        yield h, _inside(stream.documents, first, count, n)


def _inside(documents: Array, first: int, count: int, n: int) -> Array:
    """Is the position n or more tokens before the end of its document?"""
    lo, hi = np.searchsorted(documents, [first, first + count + n], side="right")
    ends = np.asarray(documents[lo:hi]) - first
    # the n − 1 places before an end are outside; short documents overlap, so outside-ness is counted
    outside = np.zeros(count + 1, dtype=np.int64)
    np.add.at(outside, np.clip(ends - (n - 1), 0, count), 1)
    np.add.at(outside, np.clip(ends, 0, count), -1)
    return np.asarray(np.cumsum(outside)[:count] == 0)


def _mix(tokens: Array) -> Array:
    """Spread token ids over 64 bits (the finaliser of SplitMix64)."""
    z = (tokens.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
