"""Sequential Monte Carlo: particles that the energy steers while they are written.

    ψ_t(x_≤t) = e^{−E(c, x_≤t)}       the twist: the energy of an unfinished continuation
    Ẑ = Σ_k n_k · Ẑ_k / Σ_k n_k       over islands of n_k particles each (``samplers.particles``)

Bad continuations are dropped after some tokens, and copies of good ones continue in their place. Any twist gives an
unbiased Ẑ; the best is ψ_t = E[e^{−E(c, x)} | x_≤t], which an energy that was fitted at several lengths
(``training.lengths``) approximates. Results of one run share ancestors; independent results need a run each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, effective_sample_size
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers.kept import Ancestry
from freenergy.samplers.particles import Island, looks, run_island
from freenergy.samplers.sampled import SILENT, Sampled, check_call

_FEW = 10.0


@final
@dataclass(frozen=True, slots=True)
class Particles:
    """All particles of one context, island by island."""

    islands: tuple[Island, ...]
    lengths: tuple[int, ...]  # where they were weighed
    x: Continuations  # [1, N]
    log_base: Float[Tensor, "1 N"]
    energy: Float[Tensor, "1 N"]
    log_weight: Float[Tensor, "1 N"]  # their mean is Ẑ

    @classmethod
    def of(cls, islands: Sequence[Island], lengths: Sequence[int]) -> "Particles":
        """Join islands."""
        x = Continuations.cat([island.x for island in islands], dim=1)
        names = ("log_base", "energy", "log_weight")
        numbers = (torch.cat([getattr(island, name) for island in islands], dim=1) for name in names)
        return cls(tuple(islands), tuple(lengths), x, *numbers)

    @property
    def log_partition(self) -> float:
        """log Ẑ of the target relative to the proposal."""
        return float(self.log_weight.logsumexp(1)) - math.log(self.log_weight.shape[1])

    @property
    def variance(self) -> float:
        """Var(Ẑ) / Z², estimated: islands are independent, and each counts by its share of all weight."""
        return self._combined([island.variance for island in self.islands])

    @property
    def origins(self) -> float:
        """Return the effective number of first particles that the last ones descend from."""
        return 1 / self._combined([1 / island.origins for island in self.islands])

    @property
    def base_tokens(self) -> int:
        """Drawn from the base."""
        return sum(island.base_tokens for island in self.islands)

    def _combined(self, values: list[Float[Tensor, " 1"]]) -> float:
        """Σ over islands of (share of all weight)² · value."""
        shares = torch.stack([island.log_weight.logsumexp(1) for island in self.islands]).softmax(0)
        return float(torch.where(shares > 0, shares.square() * torch.stack(values), 0.0).sum())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """``particles`` continuations side by side, weighed every few tokens; results are emitted by weight."""

    particles: int = 256
    check_every: int = 10  # tokens between two readings by the energy
    share: float = 0.5  # resample when fewer than this share of the particles are effective; 0 never does
    resampling: Ancestry = "strata"  # one ancestor from each stratum of the weights, or all independently
    truncation: Truncation = ANCESTRAL
    law: Law = "model"
    batch_size: int = 256  # particles of an island

    def __post_init__(self) -> None:
        check_range(self, "particles", "check_every", "batch_size", at_least=1)
        check_range(self, "share", at_least=0, at_most=1, hint=" (0 never resamples)")

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Write, weigh, exchange; then choose."""
        check_call(target, num)
        found = self.draw(target, rng.child("draw"), progress)
        return self.choose(found, num, rng.child("choose"))

    def draw(
        self, target: Target[Model], rng: Rng, progress: Progress = SILENT, *, given: Continuations | None = None
    ) -> Particles:
        """Return weighted particles with log Ẑ and their ancestry; ``given`` [1, 1] is one of them where it is given.

        It is in each island with the probability of the island's share of all particles.
        """
        islands, first, length, sizes = list[Island](), 0, target.space.length, _even(self.particles, self.batch_size)
        place = None if given is None else int(rng.child("island").categorical(torch.tensor([sizes]).double().log()))
        with progress.track("particles", self.particles * length, "tokens") as advance:
            for i, num in enumerate(sizes):
                island = run_island(
                    target, num, rng.shift(candidates=first), check_every=self.check_every, share=self.share,
                    resampling=self.resampling, truncation=self.truncation, law=self.law, advance=advance,
                    given=given if i == place else None,
                )  # fmt: skip
                islands.append(island)
                first += num
        return Particles.of(islands, looks(length, self.check_every))

    def choose(self, particles: Particles, num: int, rng: Rng) -> Sampled:
        """Emit ``num`` of the particles."""
        log_weight = particles.log_weight
        if (log_weight == -torch.inf).all():
            raise UserError(
                f"no particle is acceptable: all {self.particles} have a weight of zero (an energy of +inf), perhaps "
                "before their end; take more particles, or look at the energy of unfinished texts"
            )
        chosen: Int[Tensor, " num"] = rng.categorical(log_weight.expand(num, -1))
        x = particles.x
        return Sampled(
            x=Continuations(x.contexts, x.tokens[:, chosen], x.lengths[:, chosen]),
            log_base=particles.log_base[:, chosen],
            energy=particles.energy[:, chosen],
            method="sequential",
            law=self.law,
            distance=min(1.0, math.sqrt(particles.variance) / 2),
            is_estimated=True,
            base_tokens=particles.base_tokens,
            log_partition=float(particles.log_partition),
            ess=effective_sample_size(log_weight).item(),
            notes=_notes(particles),
        )


def _even(total: int, max_size: int) -> list[int]:
    """Split into the fewest parts of at most ``max_size`` each, of nearly the same size."""
    parts = -(-total // max_size)
    return [total // parts + (i < total % parts) for i in range(parts)]


def _notes(particles: Particles) -> tuple[str, ...]:
    n, origins = particles.log_weight.shape[1], particles.origins
    ess = effective_sample_size(particles.log_weight).item()
    notes = []
    if ess < min(_FEW, n / 2):
        notes.append(f"{ess:.1f} of {n} particles are effective at the end: take more, or look at them more often")
    if origins < min(_FEW, n / 2):
        notes.append(
            f"the particles effectively descend from {origins:.1f} of {n}: results are alike and their distance from "
            "the target is hardly known; take more particles, or resample less (share)"
        )
    return tuple(notes)
