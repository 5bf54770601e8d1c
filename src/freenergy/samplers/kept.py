"""A particle that is given: its tokens are certain, and it survives every exchange.

    multinomial:  ancestors are independent, so it stays in its slot, and the others choose theirs by weight
    strata:       the ancestor at slot j covers u in [j/N, (j + 1)/N); with b the given particle's place and
                  C its cumulative weights, u ~ Uniform[C_{b−1}, C_b) and its new slot is floor(u N)

At the start its slot is uniform. Strata depend on the order of the particles, so with them every slot matters: a
particle that is always put into slot 0 has another law, and certificates made with it are wrong.
"""

from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.rng import Rng, Rows
from freenergy.core.sequences import Continuations

Ancestry = Literal["strata", "multinomial"]


@final
class KeptParticles:
    """One given continuation of each of B contexts among N particles, and the slot that it has now."""

    def __init__(self, given: Continuations, num: int, rng: Rng) -> None:
        self.tokens = given.tokens[:, 0]
        first_b, first_n = rng.origin
        streams = [rng.child("slot", first_b + b, first_n) for b in range(len(self.tokens))]
        self.slots = torch.cat([stream.categorical(torch.zeros(1, num)) for stream in streams])
        self.is_lost = torch.zeros(len(self.tokens), dtype=torch.bool)  # it had a weight of zero at an exchange

    def writing(self, rng: Rng) -> Rng:
        """Return a stream that draws the tokens of the given particles with certainty."""
        return _KeptRng(rng, self)

    def placed(
        self,
        rows: Int[Tensor, "B N"],
        log_weight: Float[Tensor, "B N"],
        is_due: Bool[Tensor, " B"],
        resampling: Ancestry,
        rng: Rng,
        length: int,
    ) -> Int[Tensor, "B N"]:
        """Return the ancestors with the given particle at its new slot, where ancestors were drawn."""
        rows, (first_b, first_n) = rows.clone(), rng.origin
        for b in is_due.nonzero().flatten().tolist():
            old = new = int(self.slots[b])
            self.is_lost[b] |= log_weight[b, old] == -torch.inf
            if resampling == "strata":
                share = _overlap(log_weight[b].softmax(0), old)
                new = int(rng.child("slot", first_b + b, first_n, length).categorical(share.log().unsqueeze(0)))
            rows[b, new], self.slots[b] = old, new
        return rows


def _overlap(share: Float[Tensor, " N"], b: int) -> Float[Tensor, " N"]:
    """Return how much of particle b's part of the cumulative weights is in each of the N strata.

    >>> _overlap(torch.tensor([0.25, 0.75], dtype=torch.float64), 1).tolist()
    [0.25, 0.5]
    """
    N, ends = len(share), share.cumsum(0) / share.sum()
    begin = ends[b - 1] if b else torch.zeros((), dtype=ends.dtype)
    bounds = torch.arange(N + 1, dtype=ends.dtype) / N
    inside = torch.minimum(bounds[1:], ends[b]) - torch.maximum(bounds[:-1], begin)
    return inside.clamp(min=0) if (inside > 0).any() else torch.ones_like(ends)  # of no weight: any slot


@final
class _KeptRng(Rng):
    """A stream in which the tokens of given particles are certain."""

    def __init__(self, inner: Rng, kept: KeptParticles) -> None:
        super().__init__(inner.seed, inner.path, inner.origin)
        self._inner, self._kept = inner, kept

    def rows(self, contexts: int, candidates: int, draws: int) -> Rows:
        """Return streams of all particles."""
        return _KeptRows(self._inner.rows(contexts, candidates, draws), self._kept)


@final
class _KeptRows(Rows):
    def __init__(self, inner: Rows, kept: KeptParticles) -> None:
        self._inner, self._kept, self._place = inner, kept, 0

    def categorical(self, log_probs: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
        kept, t = self._kept, self._place
        self._place += 1
        tokens = kept.tokens[:, t].to(log_probs.device) if t < kept.tokens.shape[1] else torch.zeros_like(kept.slots)
        rows, slots = torch.arange(len(tokens)), kept.slots
        certain = torch.full_like(log_probs[:, 0], -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)
        log_probs = log_probs.clone()
        log_probs[rows, slots] = certain
        return self._inner.categorical(log_probs)

    def numbers(self, draw: int) -> None:
        return None
