"""Finds held-out windows that repeat text of earlier splits, which must not be used as a test.

    h(i) = Σ_j m(x[i + j]) · b^(n − 1 − j)  mod 2^64,   j = 0 … n − 1      (hash of the n-gram at i; m mixes a token)
    drop window [s, e)   if some n-gram inside it occurs in an earlier split

The few held-out hashes are sorted in memory and the training stream is streamed through a table that filters out most
of it. N-grams do not cross from one document into the next.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from freenergy.core.progress import Advance
from freenergy.corpus.windows import Places

_CHUNK = 1 << 18  # positions of the stream at a time: a few arrays of them stay in the processor's cache
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication is invertible
_MAX_FILTER_BITS = 26  # 64 MB, one byte per entry

Array = np.ndarray


class Stream(NamedTuple):
    """A stream of tokens that is read in parts, and the bounds of its documents, EOS included."""

    read: Callable[[int, int], Array]
    size: int
    documents: Integer[np.ndarray, " bounds"]

    @classmethod
    def on_disk(cls, path: Path, kind: np.dtype, documents: Integer[np.ndarray, " bounds"]) -> "Stream":
        """Return a stream over a file of tokens; it is read, not mapped, so that memory is freed behind it."""

        def read(first: int, stop: int) -> Array:
            return np.fromfile(path, dtype=kind, offset=first * kind.itemsize, count=stop - first)

        return cls(read=read, size=path.stat().st_size // kind.itemsize, documents=documents)


def repeated(held_out: Stream, earlier: Iterable[Stream], n: int, advance: Advance) -> tuple[Array, float]:
    """Return for each position of the held-out stream whether its n-gram occurs earlier, and the share that do."""
    known = np.concatenate([np.zeros(0, np.uint64), *(h[inside] for _, h, inside in _hashes(held_out, n))])
    known.sort()  # in place; of equal hashes the first is the one that is found
    seen = np.zeros(len(known), dtype=bool)
    for stream in earlier:
        _mark(known, seen, stream, n, advance)
    places = np.zeros(held_out.size, dtype=bool)
    for first, h, inside in _hashes(held_out, n):
        places[first + np.flatnonzero(inside)] = seen[np.searchsorted(known, h[inside])]
    return places, float(places.sum() / max(len(known), 1))


def touched(places: Bool[np.ndarray, " tokens"], windows: Places, prefix: int, n: int) -> Bool[np.ndarray, " windows"]:
    """Return which windows contain a marked n-gram completely."""
    before = np.zeros(len(places) + 1, dtype=np.int64)
    np.cumsum(places, out=before[1:])
    start = windows["start"]
    last = start + prefix + windows["length"] - n + 1  # one past the last place where an n-gram still fits
    return np.asarray(before[np.maximum(last, start)] > before[start])


def _mark(known: Array, seen: Array, stream: Stream, n: int, advance: Advance) -> None:
    """Set ``seen`` where a known hash occurs in the stream."""
    bits = min(max(len(known).bit_length() + 3, 8), _MAX_FILTER_BITS)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, dtype=bool)
    for part in range(0, len(known), _CHUNK):
        table[known[part : part + _CHUNK] >> shift] = True
    for _, h, inside in _hashes(stream, n):
        advance(len(h))
        h = np.sort(h[inside & table[h >> shift]])  # sorted, so that the search accesses memory in order
        at = np.minimum(np.searchsorted(known, h), max(len(known) - 1, 0))
        seen[at[known[at] == h]] = True


def _hashes(stream: Stream, n: int) -> Iterator[tuple[int, Array, Array]]:
    """Yield per chunk: its start, the hash of the n-gram at each position, and whether that is inside one document."""
    for first in range(0, stream.size, _CHUNK):
        count = min(_CHUNK, stream.size - first)
        mixed = _mix(stream.read(first, min(first + count + n - 1, stream.size)))
        mixed = np.pad(mixed, (0, count + n - 1 - len(mixed)))
        yield first, _polynomials(mixed, n), _inside(stream.documents, first, count, n)


def _polynomials(m: Array, n: int) -> Array:
    """h for every n-gram of m, from the hashes of 1, 2, 4, 8, … tokens: h_{r+s}(i) = h_r(i) · b^s + h_s(i + r)."""
    h, done = np.zeros(len(m) + 1, dtype=np.uint64), 0
    block, size = m, 1
    while True:
        if n & size:
            longer = len(m) - done - size + 1
            h = h[:longer] * _power(size) + block[done : done + longer]
            done += size
        if done == n:
            return h
        block = block[: len(block) - size] * _power(size) + block[size:]
        size *= 2


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_MULTIPLIER, exponent, 1 << 64))


def _inside(documents: Array, first: int, count: int, n: int) -> Array:
    """Return whether each position is n or more tokens before the end of its document."""
    lo, hi = np.searchsorted(documents, [first, first + count + n], side="right")
    ends = np.asarray(documents[lo:hi]) - first
    # the n − 1 places before an end are outside; short documents overlap, so outside-ness is counted
    outside = np.zeros(count + 1, dtype=np.int64)
    np.add.at(outside, np.clip(ends - (n - 1), 0, count), 1)
    np.add.at(outside, np.clip(ends, 0, count), -1)
    return np.asarray(np.cumsum(outside)[:count] == 0)


def _mix(tokens: Array) -> Array:
    """Spread token ids over 64 bits (the finaliser of SplitMix64)."""
    z = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
