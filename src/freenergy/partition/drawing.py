"""Draws from a language model, each with a weight that keeps the mean right.

    Ẑ = (1/n) Σ_i a_i · e^{−E(x_i)},      E[Ẑ] = Z

Three ways to draw. ``ancestral``: independent draws, a = 1. ``stratified``: independent but for the first token, which
is drawn in strata: draw i takes the first token at (i + u_i)/n of the cumulative probability, u_i uniform; a = 1, and
the variance is never more than that of independent draws. ``distinct``: whole continuations, no two alike
(``partition.distinct``).

The certificate, the standard error, the upper estimate and k̂ are those of independent draws. For the other two
E[Ẑ] = Z holds, hence E[log Ẑ] ≤ log Z; there is no certificate, and the standard error is told too large, since it
knows nothing of what they save.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Rows
from freenergy.core.roles import Energy, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.lm.stepping import started

_PARTS = 64  # drawn from at once: the last ones hold most of the vocabulary


@final
@dataclass(frozen=True, slots=True)
class WeightedDraws:
    """Continuations of B contexts and log a of each, −inf where there was nothing more to draw."""

    x: Continuations
    log_factor: Float[Tensor, "batch num"]


Drawing = Callable[[LanguageModel, Sequences, int, SequenceSpace, Rng], WeightedDraws]


def ancestral(base: LanguageModel, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng) -> WeightedDraws:
    """Independent draws."""
    x = base.sample(contexts, num, space, rng).x
    return WeightedDraws(x, torch.zeros(x.shape, dtype=torch.float64))


def stratified(base: LanguageModel, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng) -> WeightedDraws:
    """First tokens as often as their probability says, to within two; the rest of each draw is independent."""
    probs = base.next_log_probs(started(contexts, base.eos)).double().cpu().exp()
    first_b, first_n = rng.origin
    first = torch.stack([from_strata(p, num, rng.child("first", first_b + b, first_n)) for b, p in enumerate(probs)])
    x = base.sample(contexts, num, space, FirstGiven(rng, first)).x
    if not torch.equal(x.tokens[:, :, 0].cpu(), first):
        raise UserError(
            f"{type(base).__name__} draws its tokens elsewhere, so first tokens cannot be stratified: draw ancestrally"
        )
    return WeightedDraws(x, torch.zeros(x.shape, dtype=torch.float64))


def from_strata(mass: Float[Tensor, " V"], num: int, rng: Rng) -> Int[Tensor, " num"]:
    """``num`` indices in order: index i is drawn from the i-th of ``num`` equal parts of the cumulative mass.

    Index v comes num·mass[v] times in expectation, and never two times more or less. Inside a part there are the pieces
    of mass between two breaks, one of which is drawn: a choice among finitely many, so the branches can be counted.
    """
    ends = mass.cumsum(0) / mass.sum() * num
    bounds = torch.arange(1, num + 1, dtype=torch.float64)
    breaks = torch.cat([ends.clamp(max=num), bounds]).sort().values
    pieces = torch.cat([breaks[:1], breaks.diff()]).log()  # their lengths
    ends_at = torch.searchsorted(breaks, bounds, right=True)
    begins_at = torch.cat([torch.zeros(1, dtype=torch.long), ends_at[:-1]])
    parts = pieces.split((ends_at - begins_at).tolist())
    groups = [pad_sequence(parts[i : i + _PARTS], True, -torch.inf) for i in range(0, num, _PARTS)]
    chosen = begins_at + torch.cat([rng.categorical(group) for group in groups])
    middle = breaks[chosen] - pieces[chosen].exp() / 2
    return torch.searchsorted(ends, middle, right=True).clamp(max=int(mass.nonzero().max()))


@torch.no_grad()
def log_weights(energy: Energy, draws: WeightedDraws, *, rows: int = 256) -> Float[Tensor, "B N"]:
    """log a − E of each draw, at most ``rows`` at once, float64."""
    x = draws.x
    each = max(1, rows // x.shape[0])
    parts = [energy(x.candidates(slice(n, n + each))).double().cpu() for n in range(0, x.shape[1], each)]
    # a factor of zero is a place without a draw, whatever its energy
    return torch.where(draws.log_factor > -torch.inf, draws.log_factor - torch.cat(parts, dim=1), -torch.inf)


@final
class FirstGiven(Rng):
    """Gives the first token of every candidate, and draws the others from another stream."""

    def __init__(self, inner: Rng, first: Int[Tensor, "B N"], at: tuple[int, int] = (0, 0)) -> None:
        super().__init__(inner.seed, inner.path, inner.origin)
        self._inner, self._first, self._at = inner, first, at

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "FirstGiven":
        """The same, from a later context or candidate on."""
        b, n = self._at
        inner = self._inner.shift(contexts=contexts, candidates=candidates)
        return FirstGiven(inner, self._first, (b + contexts, n + candidates))

    def rows(self, contexts: int, candidates: int, draws: int) -> Rows:
        """Streams whose first number is not asked."""
        b, n = self._at
        return _FirstGivenRows(
            self._inner.rows(contexts, candidates, draws), self._first[b : b + contexts, n : n + candidates]
        )


@final
class _FirstGivenRows(Rows):
    def __init__(self, inner: Rows, first: Int[Tensor, "B N"]) -> None:
        self._inner = inner
        self._first: Tensor | None = first

    def categorical(self, log_probs: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
        if self._first is None:
            return self._inner.categorical(log_probs)
        first, self._first = self._first.to(log_probs.device), None
        return first

    def numbers(self, draw: int) -> Float[Tensor, "B N"] | None:
        return None if draw == 0 else self._inner.numbers(draw - 1)
