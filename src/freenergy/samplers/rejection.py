"""Rejection: exact draws where a bound on the weights is known; quasi-rejection where it is not.

    x ~ q(· | c),      accept with probability min(1, w(x)/β),      until ``num`` are accepted

Where w ≤ β everywhere, what is accepted follows the target exactly. Elsewhere it follows P_β ∝ q · min(w, β), whose
distance from the target is estimated (``samplers.divergence``). The cost is β/Z_β proposals per result on average.
``Rejection`` takes the bound on trust, and reports a weight that disproves it. ``QuasiRejection`` also chooses the
bound, from a pilot of draws of which none is emitted, so that given β the law is P_β exactly.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Law, Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import residual_of
from freenergy.partition import log_partition
from freenergy.samplers.accept import accept, acceptance
from freenergy.samplers.divergence import bound_for_acceptance, bound_for_distance, divergence
from freenergy.samplers.sampled import SILENT, Sampled, check_call

_ROUNDING = 1e-6  # nats of rounding in float32 models: a weight this little above a bound does not disprove it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Exact, as long as no weight is above e^{log_bound}."""

    log_bound: float  # log β: no weight of the target is above β
    max_proposals: int = 100_000
    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"
    batch_size: int = 128  # proposals in one call of the models

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Propose until ``num`` are accepted."""
        found, log_w = _accept(self, "rejection", self.log_bound, target, num, rng, progress)
        above = int((log_w > self.log_bound + _ROUNDING).sum())
        if not above:
            return found
        distance = divergence(log_w, self.log_bound).total_variation
        note = (
            f"the stated log_bound of {self.log_bound:g} is not a bound: {above} of {len(log_w)} weights are above it, "
            f"the largest at {float(log_w.max()):g}; the reported distance is an estimate"
        )
        return replace(found, distance=distance, is_estimated=True, notes=(note, *_doubts(log_w)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QuasiRejection:
    """At an estimated distance: give the bound, or the share of proposals to accept, or the distance to keep to."""

    log_bound: float | None = None  # log β
    acceptance: float | None = None  # the share of proposals that β should accept
    distance: float | None = None  # the total variation that β should keep to
    pilot: int = 512  # proposals that a bound is chosen from
    max_proposals: int = 100_000  # after the pilot
    truncation: Truncation = ANCESTRAL
    law: Law = "restricted"
    batch_size: int = 128  # proposals in one call of the models

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.log_bound, self.acceptance, self.distance)) != 1:
            raise UserError("quasi-rejection needs one of log_bound, acceptance and distance: give exactly one")
        check_range(self, "acceptance", "distance", above=0, below=1)
        _check(self)
        check_range(self, "pilot", at_least=1)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Choose the bound, then propose until ``num`` are accepted."""
        check_call(target, num)
        log_bound, before, tokens = self.log_bound, torch.zeros(0, dtype=torch.float64), 0
        if log_bound is None:
            pilot = self.draw_pilot(target, rng, progress)
            log_bound, before, tokens = self.choose_bound(pilot), pilot.log_weight[0], pilot.tokens_drawn
        found, log_w = _accept(self, "quasi-rejection", log_bound, target, num, rng, progress)
        seen = torch.cat([before, log_w])
        notes = _doubts(seen)
        if seen.max() <= log_bound:
            notes = (*notes, f"no weight of {len(seen)} is above the bound: the distance is of weights not seen yet")
        distance = divergence(seen, log_bound).total_variation
        return replace(found, distance=distance, is_estimated=True, base_tokens=found.base_tokens + tokens, notes=notes)

    def draw_pilot(self, target: Target[Model], rng: Rng, progress: Progress = SILENT) -> Scored:
        """The draws that a bound is chosen from; ``divergence_curve`` shows what others would have cost."""
        with progress.track("pilot", self.pilot, "candidates") as advance:
            return residual_of(target).propose(
                target.contexts, self.pilot, target.space, rng.child("pilot"),
                truncation=self.truncation, law=self.law, batch_size=self.batch_size, advance=advance,
            )  # fmt: skip

    def choose_bound(self, pilot: Scored) -> float:
        """log β for the wanted acceptance or distance."""
        pilot.check_any_acceptable()
        if self.acceptance is not None:
            return bound_for_acceptance(pilot.log_weight[0], self.acceptance)
        assert self.distance is not None
        return bound_for_distance(pilot.log_weight[0], self.distance)


def _accept(
    settings: Rejection | QuasiRejection,
    method: str,
    log_bound: float,
    target: Target[Model],
    num: int,
    rng: Rng,
    progress: Progress,
) -> tuple[Sampled, Float[Tensor, " n"]]:
    """Return the first ``num`` accepted proposals, as if β were a bound, and the weights of all that were made.

    Coins belong to proposals, so the batch size changes no result.
    """
    check_call(target, num)
    model, kept, parts = residual_of(target), list[Scored](), list[Tensor]()
    n = found = tokens = 0
    with progress.track("accepting", num, "results") as advance:
        while found < num and n < settings.max_proposals:
            count = min(settings.batch_size, settings.max_proposals - n)
            part = model.propose(
                target.contexts, count, target.space, rng.child("draw").shift(candidates=n),
                truncation=settings.truncation, law=settings.law, batch_size=settings.batch_size,
            )  # fmt: skip
            parts.append(part.log_weight[0])
            coins = accept(acceptance(parts[-1] - log_bound), rng.child("accept").shift(candidates=n))
            places = coins.nonzero().flatten()[: num - found]
            kept.append(part.take(places))
            n, found, tokens = n + count, found + len(places), tokens + part.tokens_drawn
            advance(len(places), f"{n} proposals")
    log_weight = torch.cat(parts)
    # the mean probability, not the share that was accepted: acceptances end the run, which biases the share upwards
    rate = float(acceptance(log_weight - log_bound).mean())
    if found < num:
        raise _spent(num, found, rate, log_weight)
    results = Scored.cat(kept, dim=1)
    return Sampled(
        x=results.x.to("cpu"),
        log_base=results.log_base,
        energy=results.energy,
        method=method,
        law=settings.law,
        distance=0.0,
        is_estimated=False,
        base_tokens=tokens,
        acceptance=rate,
    ), log_weight


def _doubts(log_weight: Float[Tensor, " n"]) -> tuple[str, ...]:
    """Why a distance that is estimated from these weights should not be believed."""
    n = len(log_weight)
    why = log_partition(log_weight.unsqueeze(0)).verdicts()[0] if n > 1 else "it is from one proposal"
    return (f"the distance is estimated badly: {why}",) if why else ()


def _spent(num: int, found: int, acceptance: float, log_weight: Float[Tensor, " n"]) -> UserError:
    n = len(log_weight)
    if (log_weight == -torch.inf).all():
        return UserError(
            f"no candidate is acceptable: all {n} proposals have a weight of zero (an energy of +inf); make more "
            "proposals, or look at the energy"
        )
    return UserError(
        f"{found} of {num} results were accepted in {n} proposals, at a rate of {acceptance:.2g}: raise max_proposals, "
        "lower log_bound by quasi-rejection, or resample"
    )


def _check(settings: Rejection | QuasiRejection) -> None:
    check_range(settings, "max_proposals", "batch_size", at_least=1)
    check_range(settings, "log_bound")
