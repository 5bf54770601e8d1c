"""Particles: continuations that are written side by side, weighed on the way, and exchanged.

    g_t = e^{−E(c, x_≤t)} · (P_LM/q)(x_≤t)       for law "model"; g_t = e^{−E(c, x_≤t)} for law "restricted"
    look at length t:       w_i ← w_i · g_t(x_i) / g_s(x_i)           s is the look before, g_0 = 1 and w = 1 at first
    if ESS(w) < share · N:  a_1 … a_N ~ w / Σw,   x_i ← x_{a_i},   w_i ← mean w
    at the end:             Ẑ = mean w,   E[Ẑ] = Z                    whatever g_t says before the end

The last look is at whole continuations, where g is target over proposal. If one particle is emitted by weight,

    KL(law of it ‖ target) ≤ log Z − E[log Ẑ],      TV(law, target) ≤ E|Ẑ/Z − 1| / 2 ≤ √Var(Ẑ) / (2 Z)

The variance is estimated from the ancestry of one run (Lee & Whiteley 2018): with u = w / Σw, k resamplings,
and U_e the sum of u over the particles whose ancestor at the start is e,

    Var(Ẑ) / Z²  ≈  1 − (N / (N − 1))^{k+1} · (1 − Σ_e U_e²)

E[Ẑ² · that] = Var(Ẑ) for multinomial resampling at fixed places; with k = 0 it is the error of independent draws.

One particle of each context may be given (``samplers.conditional``): it is written and kept, whatever its weight.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.progress import Advance
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Model, Target
from freenergy.core.scored import Law, Scored, effective_sample_size
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.stepping import Walk, begin
from freenergy.models.residual import residual_of
from freenergy.partition.drawing import from_strata
from freenergy.samplers.kept import Ancestry, KeptParticles

_ROUNDING = 1e-6  # equal weights have an effective size of N, nearly


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """N particles of each of B contexts that were exchanged among each other; float64 on the CPU."""

    x: Continuations
    log_base: Float[Tensor, "batch num"]
    energy: Float[Tensor, "batch num"]
    log_weight: Float[Tensor, "batch num"]
    origin: Int[Tensor, "batch num"]  # which of the particles at the start each descends from
    ess: Float[Tensor, "batch looks"]  # effective particles at each look, before they are resampled
    is_resampled: Bool[Tensor, "batch looks"]
    base_tokens: int  # drawn, including those of particles without descendants
    kept: Int[Tensor, " batch"] | None = None  # the slot of the particle that was given; −1 where its weight was zero

    @property
    def log_partition(self) -> Float[Tensor, " batch"]:
        """log Ẑ; −inf where no particle has any weight."""
        return self.log_weight.logsumexp(1) - math.log(self.log_weight.shape[1])

    @property
    def origins(self) -> Float[Tensor, " batch"]:
        """1 / Σ_e U_e²: how many particles of the start the end effectively descends from."""
        return 1 / self._by_origin().square().sum(1)

    @property
    def variance(self) -> Float[Tensor, " batch"]:
        """Var(Ẑ) / Z², estimated; inf for a single particle."""
        n, k = self.log_weight.shape[1], self.is_resampled.sum(1)
        if n == 1:
            return torch.full((len(k),), math.inf, dtype=torch.float64)
        grown = math.log(n / (n - 1)) * (k + 1).double()
        return (1 - grown.exp() * (1 - self._by_origin().square().sum(1))).clamp(min=0)

    def _by_origin(self) -> Float[Tensor, "batch num"]:
        u = self.log_weight.softmax(1)
        return torch.zeros_like(u).scatter_add(1, self.origin, u)


def looks(length: int, check_every: int) -> list[int]:
    """The lengths at which particles are weighed.

    >>> looks(40, 15)
    [15, 30, 40]
    """
    return [*range(check_every, length, check_every), length]


@torch.no_grad()
def run_island(
    target: Target[Model],
    num: int,
    rng: Rng,
    *,
    check_every: int,
    share: float,
    resampling: Ancestry = "strata",
    truncation: Truncation = ANCESTRAL,
    law: Law = "model",
    batch_size: int = 128,
    advance: Advance | None = None,
    given: Continuations | None = None,
) -> Island:
    """Write ``num`` particles of each context to their end, weighed every ``check_every`` tokens.

    A context resamples when fewer than a ``share`` of its particles are effective (0: never): one ancestor from each
    stratum of the weights, or all independently. ``given`` [B, 1] are continuations that are one of the particles
    each, and stay it.
    """
    model, contexts, space = residual_of(target), target.contexts.trimmed(), target.space
    kept = None if given is None else KeptParticles(given, num, rng)
    source = rng if kept is None else kept.writing(rng)
    walk = Walk(begin(model.base, contexts, num, space.length), contexts, num, space, source, truncation)
    flock, ess, is_resampled, base_tokens = _Flock(len(contexts), num), [], [], 0
    for length in looks(space.length, check_every):
        before = int(walk.x.lengths.sum())
        walk.go_to(length)
        drawn = int(walk.x.lengths.sum()) - before
        if drawn:  # else all have ended, and nothing is new
            draws = Draws(walk.x, walk.log_base, walk.log_proposal)
            seen = model.weigh(draws, truncation=truncation, law=law, batch_size=batch_size)
            flock.weigh(seen)
        ess.append(effective_sample_size(flock.log_weight).nan_to_num(0.0))  # 0 where none has any weight
        is_due = (ess[-1] > 0) & (ess[-1] < share * num - _ROUNDING) & (drawn > 0) & (length < space.length)
        is_resampled.append(is_due)
        if is_due.any():
            rows = _ancestors(flock.log_weight, is_due, resampling, rng, length)
            if kept is not None:
                rows = kept.placed(rows, flock.log_weight, is_due, resampling, rng, length)
            walk.select(rows)
            flock.select(rows, is_due)
        base_tokens += drawn
        if advance is not None:
            advance(drawn)
    return Island(
        x=walk.x.to("cpu"),
        log_base=walk.log_base.double().cpu(),
        energy=flock.energy,
        log_weight=flock.log_weight,
        origin=flock.origin,
        ess=torch.stack(ess, dim=1),
        is_resampled=torch.stack(is_resampled, dim=1),
        base_tokens=base_tokens,
        kept=None if kept is None else torch.where(kept.is_lost, -1, kept.slots),
    )


@final
class _Flock:
    """The numbers of the particles: weights, energies, ancestors."""

    def __init__(self, B: int, N: int) -> None:
        self.log_weight = torch.zeros(B, N, dtype=torch.float64)
        self.log_g = torch.zeros(B, N, dtype=torch.float64)  # at the last look
        self.energy = torch.zeros(B, N, dtype=torch.float64)
        self.origin = torch.arange(N).expand(B, N)

    def weigh(self, seen: Scored) -> None:
        """w ← w · g_t / g_s; a weight of zero stays zero."""
        now = seen.log_weight
        log_weight = self.log_weight + now - self.log_g
        self.log_weight = torch.where(self.log_weight == -torch.inf, -torch.inf, log_weight)
        self.log_g, self.energy = now, seen.energy

    def select(self, rows: Int[Tensor, "B N"], is_due: Bool[Tensor, " B"]) -> None:
        """Take over the places of others; where that was by weight, all weigh the mean."""
        mean = self.log_weight.logsumexp(1, keepdim=True) - math.log(rows.shape[1])
        self.log_weight = torch.where(is_due.unsqueeze(1), mean, self.log_weight)
        self.log_g, self.energy, self.origin = (
            values.gather(1, rows) for values in (self.log_g, self.energy, self.origin)
        )


def _ancestors(
    log_weight: Float[Tensor, "B N"], is_due: Bool[Tensor, " B"], resampling: Ancestry, rng: Rng, length: int
) -> Int[Tensor, "B N"]:
    """Return the ancestor of each particle: each is chosen N·w/Σw times in expectation; itself where nothing is due."""
    (B, N), (first_b, first_n) = log_weight.shape, rng.origin
    rows = torch.arange(N).repeat(B, 1)
    for b in is_due.nonzero().flatten().tolist():
        stream = rng.child("ancestors", first_b + b, first_n, length)
        if resampling == "strata":
            rows[b] = from_strata(log_weight[b].softmax(0), N, stream)
        else:
            rows[b] = stream.categorical(log_weight[b].expand(N, N))
    return rows
