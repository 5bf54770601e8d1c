"""Draws from a language model, each with a weight that keeps the mean right.

    Ẑ = (1/n) Σ_i w_i,      log w = log_base − log_proposal − E,      E[Ẑ] = Z

Three ways to draw. ``ancestral``: independent draws of P_LM, w = e^{−E}. ``stratified``: independent but for the first
token, which is drawn in strata: draw i takes the first token at (i + u_i)/n of the cumulative probability, u_i uniform;
w = e^{−E}, and the variance is never more than that of independent draws. ``distinct``: whole continuations, no two
alike (``partition.distinct``).

The certificate, the standard error, the upper estimate and k̂ are those of independent draws. For the other two
E[Ẑ] = Z holds, hence E[log Ẑ] ≤ log Z; there is no certificate, and the standard error is too large, since it does
not know what they save.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Rows
from freenergy.core.roles import Draws, Energy, LanguageModel
from freenergy.core.scored import Scored
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.energies.call import energies_in_batches
from freenergy.lm.stepping import started

_PARTS = 64  # drawn from at once: the last ones hold most of the vocabulary


Drawing = Callable[[LanguageModel, Sequences, int, SequenceSpace, Rng], Draws]


def ancestral(base: LanguageModel, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng) -> Draws:
    """Draw independently."""
    return _own(base.sample(contexts, num, space, rng))


def stratified(base: LanguageModel, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng) -> Draws:
    """Draw first tokens as often as their probability says, to within two; the rest of each draw is independent."""
    probs = base.next_log_probs(started(contexts, base.eos)).double().cpu().exp()
    first_b, first_n = rng.origin
    first = torch.stack([from_strata(p, num, rng.child("first", first_b + b, first_n)) for b, p in enumerate(probs)])
    draws = base.sample(contexts, num, space, FirstGiven(rng, first))
    if not torch.equal(draws.x.tokens[:, :, 0].cpu(), first):
        raise UserError(
            f"{type(base).__name__} draws its tokens elsewhere, so first tokens cannot be stratified: draw ancestrally"
        )
    return _own(draws)


def _own(draws: Draws) -> Draws:
    """Set q = P_LM: nothing was truncated, so the two log-probabilities differ at most by rounding."""
    return replace(draws, log_proposal=draws.log_base)


def from_strata(mass: Float[Tensor, " V"], num: int, rng: Rng) -> Int[Tensor, " num"]:
    """Draw ``num`` indices in order: index i is drawn from the i-th of ``num`` equal parts of the cumulative mass.

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


def log_weights(energy: Energy, draws: Draws) -> Float[Tensor, "B N"]:
    """Return log w of each draw, float64; an energy of +inf is a weight of zero."""
    log_base, log_proposal = draws.log_base.double().cpu(), draws.log_proposal.double().cpu()
    E = energies_in_batches(energy, draws.x, allow_inf=True)
    return Scored(x=draws.x, log_base=log_base, log_proposal=log_proposal, energy=E, law="model").log_weight


@final
class FirstGiven(Rng):
    """Gives the first token of every candidate, and draws the others from another stream."""

    def __init__(self, inner: Rng, first: Int[Tensor, "B N"], at: tuple[int, int] = (0, 0)) -> None:
        super().__init__(inner.seed, inner.path, inner.origin)
        self._inner, self._first, self._at = inner, first, at

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "FirstGiven":
        """Return the same from a later context or candidate on."""
        b, n = self._at
        inner = self._inner.shift(contexts=contexts, candidates=candidates)
        return FirstGiven(inner, self._first, (b + contexts, n + candidates))

    def rows(self, contexts: int, candidates: int, draws: int) -> Rows:
        """Return streams whose first number is not used."""
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
