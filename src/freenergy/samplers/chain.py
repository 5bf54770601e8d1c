"""Chains of any kernel: a sampler whose results are where the chains end.

    x_0 ~ q(· | c),      x_t ~ K(x_{t−1}, ·),      result: x_T;      P K = P, so that law → P as T grows

How fast is not known for a general kernel, so the distance is not known either (None). Several results are the ends of
as many chains, not places along one: given the context they are independent.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Kernel, Model, Target
from freenergy.models.residual import residual_of
from freenergy.samplers.diagnostics import diagnose
from freenergy.samplers.sampled import SILENT, Sampled, check_call

_FEW_STEPS, _FEW_CHAINS = 20, 2  # below these R̂ says nothing
_MAX_R_HAT = 1.1  # results are the ends of chains, not means along them


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Chains of ``steps`` steps side by side, one per result, started at draws of the base."""

    kernel: Kernel[Any]
    steps: int = 256

    def __post_init__(self) -> None:
        check_range(self, "steps", at_least=1)

    @torch.no_grad()
    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Start ``num`` chains and let them run."""
        check_call(target, num)
        start = residual_of(target).base.sample(target.contexts, num, target.space, rng.child("start"))
        state = self.kernel.init(target, start.x.to("cpu"))
        accepted, base_tokens = torch.zeros(num, dtype=torch.long), int(start.x.lengths.sum())
        seen = list[Tensor | None]()  # the log-density of every chain at every step, where the kernel knows it
        with progress.track("stepping", self.steps, "steps") as advance:
            for t in range(self.steps):
                state, info = self.kernel.step(target, state, rng.child("step", t))
                accepted += info.is_accepted.cpu()
                base_tokens += info.base_tokens
                seen.append(getattr(state, "log_score", None))
                advance(1)
        ends = residual_of(target).scored(state.x.to("cpu"), allow_inf=True)
        if (ends.energy == torch.inf).any():
            raise UserError(
                f"no candidate is acceptable: a chain is still at an energy of +inf after {self.steps} steps; make "
                "more steps, or look at the energy"
            )
        still = int((accepted == 0).sum())
        return Sampled(
            x=ends.x,
            log_base=ends.log_base,
            energy=ends.energy,
            method=type(self.kernel).__name__.lower(),
            law=getattr(self.kernel, "law", "model"),  # of kernels whose proposal is truncated
            distance=None,
            is_estimated=True,
            base_tokens=base_tokens,
            acceptance=float(accepted.sum()) / (self.steps * len(accepted)),
            notes=((f"{still} of {len(accepted)} chains never moved from a draw of the base",) if still else ())
            + _not_mixed(seen),
        )


def _not_mixed(seen: list[Tensor | None]) -> tuple[str, ...]:
    """Return a note where the chains still disagree on the log-density in the second half of their steps."""
    later = [own for own in seen[len(seen) // 2 :] if own is not None and own.isfinite().all()]
    if len(later) < _FEW_STEPS or len(later[0]) < _FEW_CHAINS:
        return ()
    r_hat = diagnose({"log_score": torch.stack(later, dim=1)}).r_hat["log_score"]
    if r_hat <= _MAX_R_HAT:
        return ()
    return (f"the chains have not mixed: R̂ of the log-density is {r_hat:.2f} over the second half of their steps",)
