"""The one door for randomness.

    u ~ Uniform[0, 1),      i = min { j : p_1 + … + p_j > u · (p_1 + … + p_V) }     (inverse of the cumulative sum)

A stream is named by a seed and a path of keys, so the same name gives the same bits at any time, in any process, on any
device: training step 700 draws ``rng.child("step", 700)`` and nothing needs to be saved to resume after a crash.
Candidates own their randomness (``rows``): candidate n of context b draws the same numbers whatever the batch around
it. The bits come from numpy's counter-based Philox. Tests pass an ``EnumeratingRng`` through the same door.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError

_ROWS = zlib.crc32(b"rows")  # keeps the streams of rows apart from those of child(0), child(1), …
BLOCK = 256  # tokens in a block of the two-level search: about the square root of a vocabulary


def choose(log_probs: Float[Tensor, "*rows V"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Invert the cumulative distribution at u, in two levels: short sums are faster and round less."""
    V = log_probs.shape[-1]
    p = (log_probs - log_probs.amax(-1, keepdim=True)).exp()
    if V <= BLOCK:  # one block, which need not be padded: coins and small alphabets
        target = u.unsqueeze(-1) * p.sum(-1, keepdim=True, dtype=torch.float64)
        return _first_above(p.double().cumsum(-1), target, p).squeeze(-1)
    blocks = torch.nn.functional.pad(p, (0, -V % BLOCK)).reshape(*p.shape[:-1], -1, BLOCK)
    return invert(blocks, blocks.sum(-1, dtype=torch.float64), u)[0]


def invert(
    blocks: Float[Tensor, "*rows M block"], mass: Float[Tensor, "*rows M"], u: Float[Tensor, "*rows"]
) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Return the index at u of weights in blocks with these sums, first the block, then inside it; and the total."""
    cdf = mass.cumsum(-1)
    target = u.unsqueeze(-1) * cdf[..., -1:]
    block = _first_above(cdf, target, mass)
    before = (cdf - mass).gather(-1, block)
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, BLOCK)).squeeze(-2).double()
    index = block * BLOCK + _first_above(inside.cumsum(-1), target - before, inside)
    return index.squeeze(-1), cdf[..., -1]


def _first_above(cdf: Tensor, target: Tensor, mass: Tensor) -> Tensor:
    """Index of the first cumulative sum above the target; rounding at the end falls back on the last positive mass."""
    last = mass.shape[-1] - 1 - (mass > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum((cdf <= target).sum(-1, keepdim=True), last)


class Rng:
    """A named stream of random numbers.

    >>> Rng(7).child("step", 3).uniform(2).equal(Rng(7).child("step", 3).uniform(2))
    True
    """

    def __init__(self, seed: int = 0, path: tuple[int, ...] = (), origin: tuple[int, int] = (0, 0)) -> None:
        if not 0 <= seed < 2**63:
            raise UserError(f"the seed is {seed}: take a number from 0 to 2**63 − 1")
        self.seed, self.path, self.origin = seed, path, origin

    def child(self, *keys: int | str) -> "Rng":
        """An independent stream named by keys below this one."""
        numbers = tuple(zlib.crc32(key.encode()) if isinstance(key, str) else key for key in keys)
        return Rng(self.seed, (*self.path, *numbers), self.origin)

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "Rng":
        """The same stream for a batch that begins at a later context or candidate; see ``rows``."""
        b, n = self.origin
        return Rng(self.seed, self.path, (b + contexts, n + candidates))

    def uniform(self, *shape: int) -> Float[Tensor, "..."]:
        """Uniform numbers in [0, 1), float64."""
        return torch.from_numpy(np.asarray(self._generator.random(shape)))

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Standard normal numbers, float64."""
        return torch.from_numpy(np.asarray(self._generator.standard_normal(shape)))

    def permutation(self, size: int) -> Int[Tensor, " size"]:
        """A random order of 0 … size − 1."""
        return torch.from_numpy(self._generator.permutation(size))

    def categorical(self, log_probs: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
        """One index a row, with probability proportional to exp(log_probs)."""
        return choose(log_probs, self.uniform(*log_probs.shape[:-1]).to(log_probs.device))

    def bernoulli(self, probs: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """1 with the given probability, else 0."""
        return self.categorical(torch.stack([(1 - probs).log(), probs.log()], dim=-1))

    def integer(self) -> int:
        """A number in [0, 2**62), to seed somebody else's generator."""
        return int(self._generator.integers(2**62))

    def rows(self, contexts: int, candidates: int, draws: int) -> "Rows":
        """Streams of ``draws`` numbers for candidate n of context b, counted from ``origin``, whatever the batch."""
        first_b, first_n = self.origin
        per_row = -(-draws // 4) * 4  # Philox makes four numbers a counter step, so a row begins at a whole step
        u = np.empty((contexts, candidates, draws))
        for b in range(contexts):
            source = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(*self.path, _ROWS, first_b + b)))
            source.advance(first_n * per_row // 4)
            u[b] = np.random.Generator(source).random((candidates, per_row))[:, :draws]
        return Rows(torch.from_numpy(u))

    @cached_property
    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=self.path)))


class Streams(Rng):
    """One stream a context: contexts with seeds of their own, in one batch, draw what each would alone.

    Context b has the rows of context 0 of ``streams[b]``. There is nothing else to draw: a number that belongs to no
    context would come from no stream.

    >>> both = Streams([Rng(7), Rng(8)]).rows(2, 3, 4)
    >>> both.uniform(1)[1].equal(Rng(8).rows(1, 3, 4).uniform(1)[0])
    True
    """

    def __init__(self, streams: Sequence[Rng]) -> None:
        super().__init__(0)
        self.streams = tuple(streams)

    def child(self, *keys: int | str) -> "Streams":
        """The child of every stream."""
        return type(self)([stream.child(*keys) for stream in self.streams])

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "Streams":
        """The streams of later contexts, each from a later candidate."""
        return type(self)([stream.shift(candidates=candidates) for stream in self.streams[contexts:]])

    def rows(self, contexts: int, candidates: int, draws: int) -> "Rows":
        """The rows of the first ``contexts`` streams."""
        if contexts > len(self.streams):
            raise UserError(f"{contexts} contexts draw from {len(self.streams)} streams: give one stream a context")
        rows = [stream.rows(1, candidates, draws) for stream in self.streams[:contexts]]
        return rows[0].joined(rows[1:])

    @property
    def _generator(self) -> np.random.Generator:
        raise UserError("a batch of streams has numbers for candidates only: draw others from a stream of one context")


class Rows:
    """One stream for each of B × N candidates; every call takes the next number of each."""

    def __init__(self, u: Float[Tensor, "B N draws"]) -> None:
        self._u, self._next = u, 0

    def categorical(self, log_probs: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
        """One index for each candidate, from the candidate's own stream."""
        self._next += 1
        return choose(log_probs, self.uniform(self._next - 1).to(log_probs.device))

    def joined(self, others: "Sequence[Rows]") -> "Rows":
        """Return the streams of more contexts after these."""
        return Rows(torch.cat([self._u, *(rows._u for rows in others)]))

    def uniform(self, draw: int) -> Float[Tensor, "B N"]:
        """The number of each candidate that its draw ``draw``, counted from 0, takes."""
        return self._u[:, :, draw]

    def normal(self, num: int) -> Float[Tensor, "B N num"]:
        """The next ``num`` standard normal numbers of each candidate, float64: Φ⁻¹ of its uniform ones."""
        self._next += num
        u = self._u[:, :, self._next - num : self._next]
        normal: Tensor = torch.special.ndtri(torch.where(u == 0, 2.0**-54, u))  # Φ⁻¹(0) is −∞
        return normal

    def uniforms(self, num: int) -> Float[Tensor, "B N num"]:
        """The next ``num`` uniform numbers of each candidate, float64."""
        self._next += num
        return self._u[:, :, self._next - num : self._next]

    def numbers(self, draw: int) -> Float[Tensor, "B N"] | None:
        """The same, or None where that draw takes none and has to go through ``categorical``."""
        return self.uniform(draw)
