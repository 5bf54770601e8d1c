"""Parallel tempering: a ladder of chains from the base to the target, whose neighbours exchange places.

    p_r ∝ P_LM(x | c) · exp(−β_r E(c, x)),      0 = β_0 < … < β_R = 1;      each moved by a kernel of its own
    exchange x_r and x_{r+1} with probability min(1, exp((β_{r+1} − β_r)(E_{r+1} − E_r)))

Both leave the product Π_r p_r invariant, so every rung keeps its law, and the top is the target. The lowest rung is
redrawn from the base at every step, exactly. Even and odd pairs take turns. What is stuck in one mode at β = 1 goes
down, is redrawn and comes up elsewhere. Results are the tops of as many ladders, one per result.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.registry import configured
from freenergy.core.rng import Rng
from freenergy.core.roles import Kernel, Model, Target
from freenergy.core.sequences import Continuations
from freenergy.energies.call import energies_in_batches
from freenergy.models.residual import Residual, residual_of
from freenergy.partition.annealed import scaled
from freenergy.samplers.accept import accept, acceptance, move
from freenergy.samplers.sampled import SILENT, Sampled, check_call


@final
@dataclass(frozen=True, slots=True)
class Ladder:
    """Where all rungs of all ladders are, lowest first, with their energies."""

    x: tuple[Continuations, ...]  # of each rung [1, ladders]
    energy: tuple[Float[Tensor, " ladders"], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tempering:
    """Ladders of ``rungs`` chains with β evenly spaced from 0 to 1; ``kernel`` names what moves the inner ones."""

    steps: int = 128
    rungs: int = 4
    kernel: str = "mixture"

    def __post_init__(self) -> None:
        check_range(self, "steps", at_least=1)
        check_range(self, "rungs", at_least=2)

    def betas(self) -> list[float]:
        """Return β_0 … β_R.

        >>> Tempering(rungs=3).betas()
        [0.0, 0.5, 1.0]
        """
        return [r / (self.rungs - 1) for r in range(self.rungs)]

    @torch.no_grad()
    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Start ``num`` ladders at draws of the base and let them run; return the tops."""
        check_call(target, num)
        state, taken, tokens = self.init(target, num, rng.child("start")), 0.0, 0
        with progress.track("stepping", self.steps, "steps") as advance:
            for t in range(self.steps):
                state, share = self.step(target, state, t % 2, rng.child("step", t))
                taken, tokens = taken + share, tokens + int(state.x[0].lengths.sum())
                advance(1)
        ends = residual_of(target).scored(state.x[-1], allow_inf=True)
        if (ends.energy == torch.inf).any():
            raise UserError(f"no candidate is acceptable: a top has an energy of +inf after {self.steps} steps")
        return Sampled(
            x=ends.x, log_base=ends.log_base, energy=ends.energy, method="tempering", law="model", distance=None,
            is_estimated=True, base_tokens=tokens, acceptance=taken / self.steps, notes=(),
        )  # fmt: skip

    def init(self, target: Target[Model], num: int, rng: Rng) -> Ladder:
        """Start all rungs of ``num`` ladders at draws of the base."""
        base = residual_of(target).base
        x = [
            base.sample(target.contexts, num, target.space, rng.child("rung", r)).x.to("cpu") for r in range(self.rungs)
        ]
        return Ladder(tuple(x), tuple(_energy(target, own) for own in x))

    def step(self, target: Target[Model], state: Ladder, parity: int, rng: Rng) -> tuple[Ladder, float]:
        """Move every rung once, then exchange neighbours; return the share of exchanges that were accepted."""
        model, betas, num = residual_of(target), self.betas(), state.x[0].shape[1]
        x = [model.base.sample(target.contexts, num, target.space, rng.child("lowest")).x.to("cpu")]
        for r in range(1, self.rungs):
            warm = Target(Residual(model.base, scaled(model.energy, betas[r])), target.contexts, target.space)
            kernel = self._kernel()
            x.append(kernel.step(warm, kernel.init(warm, state.x[r]), rng.child("rung", r))[0].x)
        energy, taken, pairs = [_energy(target, own) for own in x], 0.0, 0
        for r in range(parity % (self.rungs - 1) if self.rungs > 2 else 0, self.rungs - 1, 2):
            gap = energy[r + 1] - energy[r]
            log_ratio = torch.where(gap.isnan(), 0.0, (betas[r + 1] - betas[r]) * gap)
            swap = accept(acceptance(log_ratio), rng.child("exchange", r))
            x[r], x[r + 1] = move(swap, x[r + 1], x[r]), move(swap, x[r], x[r + 1])
            energy[r], energy[r + 1] = (
                torch.where(swap, energy[r + 1], energy[r]), torch.where(swap, energy[r], energy[r + 1])
            )  # fmt: skip
            taken, pairs = taken + float(swap.double().mean()), pairs + 1
        return Ladder(tuple(x), tuple(energy)), taken / max(pairs, 1)

    def _kernel(self) -> Kernel[Any]:
        from freenergy.samplers.registry import KERNELS  # here, since the registry names this sampler

        return configured(KERNELS.find(self.kernel), {}, f"the kernel {self.kernel}")


def _energy(target: Target[Model], x: Continuations) -> Float[Tensor, " ladders"]:
    return energies_in_batches(residual_of(target).energy, x, allow_inf=True)[0]
