"""What sequential Monte Carlo is certain to write: one conditional run per text.

    γ(x) = q(x) · g(x)                       the target, not normalised: P_LM(x | c) · e^{−E(c, x)} for law "model"
    P_N(x) = γ(x) · E_cSMC(x)[1/Ẑ]           the law of the particle that ``Sequential`` emits, for every N
    log P_N(x) ≥ E_cSMC(x)[log γ(x) − log Ẑ]       by Jensen: one run per text is unbiased for a lower bound

cSMC(x) is the same algorithm with x kept as one of its particles (``samplers.kept``; Andrieu, Doucet and Holenstein,
"Particle Markov chain Monte Carlo methods", 2010). The identity holds for any twists, for any rule that resamples by
the weights alone, for texts that EOS ends between two looks, and with islands. Each mean weight is at least the kept
particle's share of it, so the gain log γ(x) − log P_LM(x) − log Ẑ is at most (resamplings + 1) · log N: with k looks
the ceiling is k · log N, where plain resampling has log N.
"""

import math
from typing import NamedTuple

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.lm.token_log_probs import log_proposal
from freenergy.models.residual import residual_of
from freenergy.partition.exact import check_in_space
from freenergy.samplers.particles import Island
from freenergy.samplers.sequential import Particles, Sequential


class ConditionalRun(NamedTuple):
    """One conditional run: ``log_prob`` is in expectation at most log P_N(x)."""

    log_prob: float  # log γ(x) − log Ẑ; −inf where x has a weight of zero on its way
    particles: Particles


def conditional_run(target: Target[Model], x: Continuations, sampler: Sequential, rng: Rng) -> ConditionalRun:
    """Run the sampler with the text ``x`` [1, 1] kept as one of its particles."""
    if len(target) != 1 or x.shape != (1, 1):
        raise UserError(f"{len(target)} contexts and texts of shape {x.shape} were given: give one text of one context")
    check_in_space(x, target.space)
    found = sampler.draw(target, rng, given=x)
    for island in found.islands:
        if island.kept is not None and island.kept[0] >= 0:
            return ConditionalRun(_log_gamma(target, x, sampler, island) - found.log_partition, found)
    return ConditionalRun(-math.inf, found)


def _log_gamma(target: Target[Model], x: Continuations, sampler: Sequential, island: Island) -> float:
    """log γ(x), from the numbers of the kept particle."""
    assert island.kept is not None
    slot = int(island.kept[0])
    assert island.x.lists()[0][slot] == x.lists()[0][0], "a kept particle keeps its tokens"
    log_q = float(island.log_base[0, slot])
    if sampler.law == "restricted" and not sampler.truncation.is_identity:
        log_q = float(log_proposal(residual_of(target).base, x, sampler.truncation))
    return log_q - float(island.energy[0, slot])
