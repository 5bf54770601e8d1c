"""n different continuations, each with the exact weight that its chance of being taken asks for.

    c such that Σ_v min(m_v/c, 1) = n;      m_v > c: taken for sure, stands for m_v
                                            m_v ≤ c: taken m_v/c times in expectation, stands for c each time

Token by token: every string of the beam is continued by every token, and of all these, with masses m (mass of the
string times probability of the token), up to n are taken, no two alike. What is heavier than c is kept with its own
mass; the rest share what is left in equal strata of mass c, and one is drawn from each; what two strata drew is one
string that stands for 2c. Masses always add up to one, and E[Σ m(x) f(x)] = Σ P_LM(x) f(x) after every step (after
Fearnhead and Clifford 2003, who draw all strata with one random number: here that would tie the strings together, since
each stratum is the continuations of one string). Where the space has at most n strings all are taken, and Ẑ = Z.

A string that P_LM writes often is scored once instead of often. The cost is a call of ``next_log_probs`` per token,
which reads every string of the beam again: little for tables and n-grams, much for networks unless few tokens are left
to draw.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.lm.stepping import started
from freenergy.partition.drawing import from_strata


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
    tokens = torch.stack([_filled(tokens, num) for tokens, _ in beams])
    mass = torch.stack([torch.nn.functional.pad(mass, (0, num - len(mass))) for _, mass in beams])
    x = Continuations(contexts, tokens, space.lengths(tokens))
    return Draws(x, mass.log(), torch.full_like(mass, -math.log(num)))


def _beam(
    base: LanguageModel, context: Sequences, num: int, space: SequenceSpace, rng: Rng
) -> tuple[Int[Tensor, "k L"], Float[Tensor, " k"]]:
    """Return up to ``num`` strings of one context, and their masses; what stands after EOS is zeros."""
    tokens, mass = torch.zeros(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    done = torch.zeros(1, dtype=torch.bool)
    for t in range(space.length):
        going = tokens[~done]
        read = torch.cat([context.tokens.expand(len(going), -1), going], dim=1)
        log_p = base.next_log_probs(Sequences(read, context.lengths.expand(len(going)) + t)).double().cpu()
        children = (mass[~done].unsqueeze(1) * log_p.exp()).flatten()
        taken, mass = take(torch.cat([mass[done], children]), num, rng)
        ended, child = taken[taken < done.sum()], taken[taken >= done.sum()] - done.sum()
        V = log_p.shape[1]
        grown = torch.cat([going[child // V], (child % V).unsqueeze(1)], dim=1)
        tokens = torch.cat([torch.nn.functional.pad(tokens[done][ended], (0, 1)), grown])
        done = torch.cat([torch.ones(len(ended), dtype=torch.bool), _ended(grown, space.eos)])
        if done.all():
            return torch.nn.functional.pad(tokens, (0, space.length - t - 1)), mass
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


def _ended(tokens: Int[Tensor, "k t"], eos: int | None) -> Bool[Tensor, " k"]:
    return torch.zeros(len(tokens), dtype=torch.bool) if eos is None else tokens[:, -1] == eos


def _filled(tokens: Int[Tensor, "k L"], num: int) -> Int[Tensor, "num L"]:
    """Fill empty places with the first string."""
    return torch.cat([tokens, tokens[:1].expand(num - len(tokens), -1)])
