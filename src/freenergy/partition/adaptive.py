"""As many draws as the answer needs.

    stop when   upper − lower ≤ width,  2 · 1.96 · se ≤ width  and the verdict is silent;   or when the budget is spent

Every context goes on by itself, in batches, and owns its random numbers.

Looking before stopping is not free. A context stops when its weights look even, and they look even more often while the
rare large ones have not come yet; so E[Ẑ] = Z and E[T_n] ≤ log Z, which hold at an n fixed beforehand, hold only nearly
here, and the estimate leans to the low side. The certificate does need an n that was fixed beforehand: never compute it
from draws that were stopped by looking at their weights.
"""

from dataclasses import dataclass
from typing import final

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.models.residual import Residual, relative_to_base
from freenergy.partition.drawing import Drawing, ancestral, log_weights
from freenergy.partition.estimate import LogPartition
from freenergy.partition.weights import WeightSums

_NORMAL = 1.96


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """When to stop: nats that the interval may be wide, most draws of a context, draws between two looks."""

    width: float = 0.1
    budget: int = 16_384
    batch: int = 256

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise UserError(f"width is {self.width} nats: set it above 0")
        if self.batch < 1 or self.budget < 2:
            raise UserError(f"a budget of {self.budget} draws in batches of {self.batch}: set them to 2 and 1 or more")


def estimate_log_partition(
    target: Target[Model],
    rng: Rng,
    *,
    until: StoppingRule = StoppingRule(),  # noqa: B008 (frozen)
    draw: Drawing = ancestral,
) -> LogPartition:
    """Estimate log Z of each context from as many draws as it needs; ``draws`` of the answer says how many."""
    if not len(target):
        raise UserError("log Z of no contexts was asked for: give at least one")
    own = relative_to_base(target)
    return LogPartition.cat([_one(own[b : b + 1], rng.shift(contexts=b), until, draw) for b in range(len(target))])


def _one(target: Target[Residual], rng: Rng, until: StoppingRule, draw: Drawing) -> LogPartition:
    model = target.model
    sums = WeightSums.empty(1)
    while True:
        num = min(until.batch, until.budget - sums.n)
        drawn = draw(model.base, target.contexts, num, target.space, rng.shift(candidates=sums.n))
        sums.add(log_weights(model.energy, drawn))
        if sums.n < 2:
            continue
        found = sums.log_partition()
        if sums.n == until.budget or _is_narrow(found, until.width):
            return found


def _is_narrow(found: LogPartition, width: float) -> bool:
    interval = max((found.upper - found.lower).item(), 2 * _NORMAL * found.standard_error.item())
    return interval <= width and not found.verdict()
