"""Draws from a language model, each with a weight that keeps the mean right.

    Ẑ = (1/n) Σ_i w_i,      log w = log_base − log_proposal − E,      E[Ẑ] = Z

Three ways to draw. ``ancestral``: independent draws of P_LM, w = e^{−E}. ``stratified``: independent but for the first
token, which is drawn in strata: draw i takes the first token at (i + u_i)/n of the cumulative probability, u_i uniform;
w = e^{−E}, and the variance is never more than that of independent draws. ``distinct``: whole continuations, no two
alike, each with the exact weight that its chance of being taken asks for:

    c such that Σ_v min(m_v/c, 1) = n;      m_v > c: taken for sure, stands for m_v
                                            m_v ≤ c: taken m_v/c times in expectation, stands for c each time

Token by token: every string of the beam is continued by every token, and of all these, with masses m (mass of the
string times probability of the token), up to n are taken, no two alike. What is heavier than c is kept with its own
mass; the rest share what is left in equal strata of mass c, and one is drawn from each; what two strata drew is one
string that stands for 2c. Masses always add up to one, and E[Σ m(x) f(x)] = Σ P_LM(x) f(x) after every step (after
Fearnhead and Clifford 2003, who draw all strata with one random number: here that would tie the strings together, since
each stratum is the continuations of one string). Where the space has at most n strings all are taken, and Ẑ = Z. A
string that P_LM writes often is scored once instead of often; the cost is a call of ``next_log_probs`` per token, which
reads every string of the beam again: little for tables and n-grams, much for networks.

The certificate, the standard error, the upper estimate and k̂ are those of independent draws. For the other two
E[Ẑ] = Z holds, hence E[log Ẑ] ≤ log Z; there is no certificate, and the standard error is too large, since it does
not know what they save.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Rows
from freenergy.core.roles import Draws, Energy, LanguageModel
from freenergy.core.scored import Scored
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
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
    return _own(sample_from(base, contexts, first, space, rng))


def _own(draws: Draws) -> Draws:
    """Set q = P_LM: nothing was truncated, so the two log-probabilities differ at most by rounding."""
    return replace(draws, log_proposal=draws.log_base)


def sample_from(
    base: LanguageModel,
    contexts: Sequences,
    first: Int[Tensor, "B N"],
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation = ANCESTRAL,
) -> Draws:
    """Draw N continuations of each context whose first tokens are given."""
    draws = base.sample(contexts, first.shape[1], space, FirstGiven(rng, first), truncation)
    if not torch.equal(draws.x.tokens[:, :, 0].cpu(), first):
        raise UserError(
            f"{type(base).__name__} draws its tokens elsewhere, so first tokens cannot be given to it: draw "
            "ancestrally, or take a base that draws here"
        )
    return draws


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


def distinct(base: LanguageModel, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng) -> Draws:
    """Draw up to ``num`` different continuations of each context; places that are left over have mass 0.

    ``log_base`` is the log of the mass that a string stands for, each of ``num`` places being one of 1/num: with these
    log w = log_base − log_proposal − E is right, and for strings that are taken for sure ``log_base`` is log P_LM.
    """
    begun, (first_b, first_n) = started(contexts, base.eos), rng.origin
    beams = [
        _beam(base, begun[b : b + 1].trimmed(), num, space, rng.child("beam", first_b + b, first_n))
        for b in range(len(contexts))
    ]
    # empty places hold the first string
    tokens = torch.stack([torch.cat([some, some[:1].expand(num - len(some), -1)]) for some, _ in beams])
    mass = torch.stack([pad(mass, (0, num - len(mass))) for _, mass in beams])
    x = Continuations(contexts, tokens, space.lengths(tokens))
    return Draws(x, mass.log(), torch.full_like(mass, -math.log(num)))


def _beam(
    base: LanguageModel, context: Sequences, num: int, space: SequenceSpace, rng: Rng
) -> tuple[Int[Tensor, "k L"], Float[Tensor, " k"]]:
    """Return up to ``num`` strings of one context, and their masses; what stands after EOS is zeros."""
    tokens, mass = torch.zeros(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    done, eos = torch.zeros(1, dtype=torch.bool), -1 if space.eos is None else space.eos
    for t in range(space.length):
        going = tokens[~done]
        read = torch.cat([context.tokens.expand(len(going), -1), going], dim=1)
        log_p = base.next_log_probs(Sequences(read, context.lengths.expand(len(going)) + t)).double().cpu()
        children = (mass[~done].unsqueeze(1) * log_p.exp()).flatten()
        taken, mass = take(torch.cat([mass[done], children]), num, rng)
        ended, child = taken[taken < done.sum()], taken[taken >= done.sum()] - done.sum()
        V = log_p.shape[1]
        grown = torch.cat([going[child // V], (child % V).unsqueeze(1)], dim=1)
        tokens = torch.cat([pad(tokens[done][ended], (0, 1)), grown])
        done = torch.cat([torch.ones(len(ended), dtype=torch.bool), grown[:, -1] == eos])
        if done.all():
            return pad(tokens, (0, space.length - t - 1)), mass
    return tokens, mass


def take(mass: Float[Tensor, " K"], num: int, rng: Rng) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """Take up to ``num`` of K things, no two alike, in order, and the mass that each then stands for."""
    present = mass.nonzero().flatten()
    if len(present) <= num:
        return present, mass[present]
    ranked = mass.sort(descending=True).values
    left = ranked.flip(0).cumsum(0).flip(0)[:num]  # Σ of all but the r largest
    cuts = left / (num - torch.arange(num))
    r = int((ranked[:num] > cuts).sum())  # the number above the cut
    c = cuts[r]
    sure = mass > c
    # in the order of the strings, so that every beginning gets its share
    drawn, times = from_strata(mass.masked_fill(sure, 0), num - r, rng).unique(return_counts=True)
    taken, place = torch.cat([sure.nonzero().flatten(), drawn]).sort()
    return taken, torch.cat([mass[sure], times * c])[place]


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
