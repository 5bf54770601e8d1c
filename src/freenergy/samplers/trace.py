"""Watch chains: run any kernel from given positions and keep a few numbers of every state.

x_t ~ K(x_{t−1}, ·),      values[name][chain, t] = statistic(x_t),      t = burn_in … steps, every ``every`` steps
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.samplers.diagnostics import Diagnostics, diagnose

X = TypeVar("X")
Statistic = Callable[[Any], Float[Tensor, " chains"]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTrace(Generic[X]):
    """What chains did: the numbers that were kept, acceptance per chain, and where they ended."""

    values: dict[str, Float[Tensor, "chains draws"]]
    acceptance: Float[Tensor, " chains"]
    x: X
    steps: int

    def diagnostics(self) -> Diagnostics:
        """Compare the chains."""
        return diagnose(self.values, self.acceptance)


def trace_chains(
    kernel: Any,
    target: Any,
    x: Any,
    *,
    steps: int,
    rng: Rng,
    statistics: Mapping[str, Statistic],
    burn_in: int = 0,
    every: int = 1,
    progress: Progress = SILENT,
) -> ChainTrace[Any]:
    """Run chains from positions [1, chains] and keep the statistics of their states, each a number per chain.

    A statistic reads the state of the kernel: ``lambda state: state.log_score``, or anything of ``state.x``.
    """
    if not 0 <= burn_in < steps or every < 1:
        raise UserError(f"of {steps} steps with a burn-in of {burn_in} and every {every} none is kept: make more steps")
    state, kept, accepted = kernel.init(target, x), {name: list[Tensor]() for name in statistics}, None
    with progress.track("stepping", float(steps), "steps") as advance:
        for t in range(steps):
            state, info = kernel.step(target, state, rng.child("step", t))
            taken = info.is_accepted.double().cpu()
            accepted = taken if accepted is None else accepted + taken
            if t >= burn_in and (t - burn_in) % every == 0:
                for name, statistic in statistics.items():
                    kept[name].append(statistic(state).detach().double().cpu())
            advance(1.0)
    assert accepted is not None
    values = {name: torch.stack(own, dim=1) for name, own in kept.items()}
    return ChainTrace(values=values, acceptance=accepted / steps, x=state.x, steps=steps)
