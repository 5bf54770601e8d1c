"""log Z by importance sampling: as many draws of the base as the answer needs.

    stop when   upper − lower ≤ width,  2 · 1.96 · se ≤ width  and the verdict is empty;   or at max_draws

Every context stops on its own, draws in batches, and owns its random numbers.

Checking before stopping is not free. A context stops when its weights look even, and they look even more often while
the rare large ones have not come yet; so E[Ẑ] = Z and E[T_n] ≤ log Z, which hold at an n fixed beforehand, hold only
nearly here, and the estimate leans to the low side. For an n that is fixed set check_every = max_draws. The certificate
needs a fixed n: never compute it from draws that were stopped by looking at their weights.
"""

from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.models.residual import Residual, relative_to_base
from freenergy.partition.drawing import Drawing, ancestral, distinct, log_weights, stratified
from freenergy.partition.estimate import LogPartition
from freenergy.partition.weights import WeightSums

DRAWINGS: dict[str, Drawing] = {"ancestral": ancestral, "stratified": stratified, "distinct": distinct}
_NORMAL = 1.96


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """When to stop: the width of the interval in nats, the maximal draws per context, the draws between two checks."""

    width_nats: float = 0.1
    max_draws: int = 16_384
    check_every: int = 256

    def __post_init__(self) -> None:
        check_range(self, "width_nats", above=0)
        check_range(self, "max_draws", at_least=2)
        check_range(self, "check_every", at_least=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Ẑ = mean of P_LM/q · exp(−E) over draws; E[Ẑ] = Z where the number of draws is fixed.

    ``draw`` names how draws are made (``partition.drawing``).

    >>> from freenergy.testing import World
    >>> world = World()
    >>> found = Importance(until=StoppingRule(width_nats=0.05))(world.target(), Rng(0))
    >>> abs(found.lower.item() - world.log_partition()) < 0.1
    True
    """

    until: StoppingRule = StoppingRule()
    draw: Literal["ancestral", "stratified", "distinct"] = "ancestral"

    def __call__(self, target: Target[Model], rng: Rng) -> LogPartition:
        """Estimate log Z of each context; ``draws`` of the answer says how many it took."""
        if not len(target):
            raise UserError("log Z of no contexts was asked for: give at least one")
        own = relative_to_base(target)
        return LogPartition.cat([self._one(own[b : b + 1], rng.shift(contexts=b)) for b in range(len(target))])

    def _one(self, target: Target[Residual], rng: Rng) -> LogPartition:
        model, until, sums = target.model, self.until, WeightSums.empty(1)
        while True:
            num = min(until.check_every, until.max_draws - sums.n)
            stream = rng.shift(candidates=sums.n)
            draws = DRAWINGS[self.draw](model.base, target.contexts, num, target.space, stream)
            sums.add(log_weights(model.energy, draws))
            if sums.n < 2:
                continue
            found = sums.log_partition()
            if sums.n == until.max_draws or _is_narrow(found, until.width_nats):
                return found


def _is_narrow(found: LogPartition, width: float) -> bool:
    interval = max((found.upper - found.lower).item(), 2 * _NORMAL * found.standard_error.item())
    return interval <= width and not found.verdict()
