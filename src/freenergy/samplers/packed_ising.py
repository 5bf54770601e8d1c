"""Thousands of Ising chains at once: 64 chains per machine word, one bit per spin.

    up = [u < p_h],   p_h = 1 / (1 + e^{−2β(J h + H)}),   h = Σ_{j~i} x_j,   u ~ Uniform{0 … 2^24 − 1} / 2^24

A word holds one site of 64 chains. The neighbours that are up are counted by a bit-sliced adder, and u is compared with
the thresholds of all h bit by bit: 24 random words and one operation per bit and threshold move 64 spins. With no field
p_{−h} = 1 − p_h, so half of the thresholds serve all: up = [u ≥ p_{−h}] for h > 0. A threshold is off by at most 2^−25.
The two colours of the checkerboard are stored apart, [words, side, side/2]; in row i column k of colour c is column
2k + (i + c) mod 2 of the lattice.

Chain n has its bits from the stream of its word n // 64, whatever other chains there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, UInt64
from scipy.special import expit

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences
from freenergy.models.ising import Ising

BITS = 24
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD = 64
Words = UInt64[np.ndarray, "words side half"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PackedSpins:
    """64 chains per word: the spins of both colours."""

    even: Words
    odd: Words

    @property
    def chains(self) -> int:
        """How many chains there are: a multiple of 64."""
        return int(self.even.shape[0]) * _WORD

    def spins(self) -> Float[torch.Tensor, "chains side side"]:
        """Return −1 and +1 of every chain, float64."""
        W, side, half = self.even.shape
        found = np.empty((W, _WORD, side, 2 * half), dtype=np.float64)
        for words, colour in ((self.even, 0), (self.odd, 1)):
            bits = (words[:, None] >> np.arange(_WORD, dtype=np.uint64)[None, :, None, None]) & np.uint64(1)
            for i in range(side):
                found[:, :, i, (i + colour) % 2 :: 2] = bits[:, :, i]
        return torch.from_numpy(2 * found.reshape(W * _WORD, side, 2 * half) - 1)

    def continuations(self) -> Continuations:
        """Return the chains as strings of tokens, for kernels and models."""
        tokens = (self.spins().flatten(1) > 0).long().unsqueeze(0)
        lengths = torch.full((1, self.chains), tokens.shape[2])
        return Continuations(Sequences.from_lists([[]]), tokens, lengths)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIsing:
    """Heat-bath sweeps of a lattice with an even side.

    >>> packed = PackedIsing(model=Ising(side=4, beta=0.0, boundary="periodic"))
    >>> packed.run(packed.start(64, Rng(0)), 2, Rng(1)).chains
    64
    """

    model: Ising

    def __post_init__(self) -> None:
        if self.model.side % 2:
            raise UserError(f"packed chains need an even side, not {self.model.side}: choose one, or gibbs")

    def start(self, num: int, rng: Rng) -> PackedSpins:
        """Draw every spin of ``num`` chains by a fair coin."""
        if num < 1 or num % _WORD:
            raise UserError(f"{num} chains were asked for: packed chains come in multiples of {_WORD}")
        side = self.model.side
        raw = np.stack([own.random_raw(side * side) for own in _streams(num // _WORD, rng.child("start"))])
        both = raw.reshape(num // _WORD, 2, side, side // 2)
        return PackedSpins(both[:, 0].copy(), both[:, 1].copy())

    def run(self, state: PackedSpins, sweeps: int, rng: Rng, progress: Progress = SILENT) -> PackedSpins:
        """Sweep every chain: the even colour given the odd one, then the odd given the even."""
        if sweeps < 0:
            raise UserError(f"{sweeps} sweeps were asked for: ask for 0 or more")
        even, odd = state.even, state.odd
        streams = _streams(even.shape[0], rng.child("sweeps"))
        planes = np.empty((BITS, *even.shape), dtype=np.uint64)
        with progress.track("sweeping", float(sweeps), "sweeps") as advance:
            for _ in range(sweeps):
                even = self.half_sweep(odd, 0, _filled(planes, streams))
                odd = self.half_sweep(even, 1, _filled(planes, streams))
                advance(1.0)
        return PackedSpins(even, odd)

    def half_sweep(self, other: Words, colour: int, planes: UInt64[np.ndarray, "bits words side half"]) -> Words:
        """Redraw one colour given the other; plane b has bit b of 1 − u in every chain."""
        found = np.zeros_like(other)
        lower = {h: less_than(self.threshold(h), planes) for h in self._own_fields()}
        for h, mask in self._fields(other, colour):
            if h in lower:
                found |= mask & lower[h]
            else:
                found |= mask & ~lower[-h]
        return found

    def threshold(self, h: int) -> int:
        """p_h · 2^24, rounded."""
        log_odds = 2 * self.model.beta * (self.model.coupling * h + self.model.field)
        found: int = round(float(expit(log_odds)) * 2**BITS)
        return found

    def _own_fields(self) -> list[int]:
        """The values of h that need a threshold of their own; −h stands for h where there is no field."""
        step = 2 if self.model.boundary == "periodic" else 1
        every = range(-4, 5, step)
        return [h for h in every if h <= 0] if self.model.field == 0 else list(every)

    def _fields(self, other: Words, colour: int) -> Iterator[tuple[int, Words]]:
        """Yield every value of h with the chains and sites that have it."""
        n = neighbours(other, colour, is_periodic=self.model.boundary == "periodic")
        x, c1, y, c2 = n[0] ^ n[1], n[0] & n[1], n[2] ^ n[3], n[2] & n[3]
        one, two_pairs = x ^ y, c1 & c2
        counts = [~(n[0] | n[1] | n[2] | n[3]), one & ~(c1 | c2), ~one, one & (c1 | c2), two_pairs]
        counts[2] &= ~(counts[0] | two_pairs)
        if self.model.boundary == "periodic":
            yield from ((2 * s - 4, counts[s]) for s in range(5))
            return
        for degree, sites in _degrees(self.model.side, colour).items():
            yield from ((2 * s - degree, counts[s] & sites) for s in range(degree + 1))


def neighbours(other: Words, colour: int, *, is_periodic: bool) -> list[Words]:
    """Return the four neighbours of every site of ``colour``, all of the other colour; 0 beyond an open border."""
    above, below = np.roll(other, 1, axis=1), np.roll(other, -1, axis=1)
    beside, side = np.empty_like(other), other.shape[1]
    left, right = (
        slice(colour, side, 2),
        slice(1 - colour, side, 2),
    )  # rows where it is on that side
    beside[:, left] = np.roll(other[:, left], 1, axis=2)
    beside[:, right] = np.roll(other[:, right], -1, axis=2)
    if not is_periodic:
        above[:, 0], below[:, -1] = 0, 0
        beside[:, left, 0], beside[:, right, -1] = 0, 0
    return [other, above, below, beside]


def _degrees(side: int, colour: int) -> dict[int, UInt64[np.ndarray, "1 side half"]]:
    """Return the sites of ``colour`` with 2, 3 and 4 neighbours inside an open border, as words of ones."""
    place = np.arange(side)
    border = ((place == 0) | (place == side - 1)).astype(int)
    degree = 4 - border[:, None] - border[None, :]
    packed = np.stack([degree[i, (i + colour) % 2 :: 2] for i in range(side)])
    return {d: np.where(packed == d, _ALL, np.uint64(0))[None] for d in (2, 3, 4)}


def less_than(threshold: int, planes: UInt64[np.ndarray, "bits words side half"]) -> Words:
    """Return [u < threshold] for 64 chains per word; planes hold the bits of ~u, the lowest first."""
    if threshold <= 0 or threshold >= 2**BITS:
        return np.full(planes.shape[1:], _ALL if threshold > 0 else 0, dtype=np.uint64)
    first = (threshold & -threshold).bit_length() - 1  # below its lowest one a threshold decides nothing
    found: Words = planes[first].copy()
    for bit in range(first + 1, BITS):
        if threshold >> bit & 1:
            found |= planes[bit]
        else:
            found &= planes[bit]
    return found


def _streams(words: int, rng: Rng) -> list[np.random.SFC64]:
    """One generator per word of chains, seeded by its number alone; SFC64 makes whole words faster than Philox."""
    return [np.random.SFC64(rng.child("word", w).integer()) for w in range(words)]


def _filled(
    planes: UInt64[np.ndarray, "bits words side half"], streams: list[np.random.SFC64]
) -> UInt64[np.ndarray, "bits words side half"]:
    bits, _, side, half = planes.shape
    for w, stream in enumerate(streams):
        planes[:, w] = stream.random_raw(bits * side * half).reshape(bits, side, half)
    return planes
