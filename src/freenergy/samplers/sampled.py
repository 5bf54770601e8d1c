"""What every sampler returns, and how it is called.

    sampler(target, num, rng) -> Sampled

A sampler is its settings. It reports which law it samples, how far its own law can be from that (``distance``: a bound
on the total variation; None where none is known), whether that is a guarantee or an estimate from the draws, and its
cost. One context at a time: its candidates fill the machine, and memory does not grow with the number of
contexts.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, final, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Continuations

SILENT = Silent()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """``num`` continuations of one context."""

    x: Continuations  # [1, num]
    log_base: Float[Tensor, "1 num"]
    energy: Float[Tensor, "1 num"]
    method: str
    law: Law | Literal["base"]
    distance: float | None  # total variation between the law of one result and the target, at most; None: unknown
    is_estimated: bool  # the distance is an estimate from the draws, not a guarantee
    base_tokens: int  # drawn from the base
    log_partition: float | None = None  # log Ẑ, where the sampler has an estimate of its own
    ess: float | None = None  # effective candidates or particles, likewise
    acceptance: float | None = None  # share of proposals that were accepted
    candidates: Scored | None = None  # with their weights, where results were chosen among candidates
    chosen: Int[Tensor, " num"] | None = None  # which of them
    notes: tuple[str, ...] = ()  # reasons not to trust it

    @property
    def log_score(self) -> Float[Tensor, "1 num"]:
        """log P_LM − E: not normalised."""
        return self.log_base - self.energy


@runtime_checkable
class Sampler(Protocol):
    """x ~ P, or nearly: settings that can be called."""

    def __call__(self, target: Target[Any], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Sample ``num`` results for the one context of the target; the same ``rng`` gives the same results."""


def picked(candidates: Scored, chosen: Int[Tensor, " num"]) -> Continuations:
    """Select candidates of the one context, a candidate perhaps more than once."""
    x = candidates.x
    return Continuations(x.contexts.to("cpu"), x.tokens.cpu()[:, chosen], x.lengths.cpu()[:, chosen])


def check_call(target: Target[Model], num: int) -> None:
    """Refuse several contexts (samplers take one at a time) and no results."""
    if len(target) != 1:
        raise UserError(f"{len(target)} contexts were given to a sampler: give one at a time")
    if num < 1:
        raise UserError(f"{num} results were asked for: ask for 1 or more")
