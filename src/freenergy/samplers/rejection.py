"""Rejection: exact draws where a bound on the weights is known; quasi-rejection where it is not (Eikema et al. 2022).

    x ~ q,  accepted with probability min(1, w(x)/β):      P_β(x) = q(x) · min(w(x), β) / Z_β,   Z_β = E_q[min(w, β)]
    acceptance rate = Z_β/β,      Z = E_q[w],      P(x) = q(x) · w(x) / Z
    TV(P, P_β) = E_q[(w/Z − min(w, β)/Z_β)⁺]  ≤  1 − Z_β/Z                 since P_β ≥ P · min(1, β/w)
    KL(P ‖ P_β) = log(Z_β/Z) + E_P[(log w − log β)⁺]

Where w ≤ β everywhere, P_β = P: what is accepted follows the target exactly. The cost is β/Z_β proposals per result on
average. ``Rejection`` takes the bound on trust, and reports a weight that disproves it. ``QuasiRejection`` also chooses
the bound, from a pilot of draws of which none is emitted, so that given β the law is P_β exactly.

Every expectation is a mean over draws of q, so one set of draws gives the whole curve; the acceptance rate is unbiased,
the others are ratios. None of them accounts for weights that have not been seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from scipy.optimize import brentq
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
from freenergy.samplers.sampled import SILENT, Sampled, check_call

_NEARLY_ALL = 0.9  # of the proposals with any weight
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The cost of a bound, and how far from the target it leaves the results."""

    log_bound: float  # log β
    acceptance: float  # Z_β/β
    total_variation: float  # TV(P, P_β)
    standard_error: float  # of the total variation, by the delta method
    at_most: float  # 1 − Z_β/Z, which the total variation does not exceed
    kl: float  # KL(P ‖ P_β), nats


def divergence_curve(
    candidates: Scored, log_bounds: Sequence[float] | None = None, *, num: int = 20
) -> list[Divergence]:
    """The divergence at each bound; without bounds, at ``num``: from accepting nearly all up to the largest weight."""
    if len(candidates.energy) != 1:
        raise UserError(f"candidates of {len(candidates.energy)} contexts were given: a curve is of one context")
    candidates.check_any_acceptable()
    log_weight = candidates.log_weight[0]
    if log_bounds is None:
        if num < 2:
            raise UserError(f"a curve of {num} bounds was asked for: ask for 2 or more")
        share, high = (log_weight > -torch.inf).double().mean().item(), float(log_weight.max())
        low = min(bound_for_acceptance(log_weight, _NEARLY_ALL * share), high)
        log_bounds = torch.linspace(low, high, num, dtype=torch.float64).tolist()
    return [divergence(log_weight, bound) for bound in log_bounds]


def divergence(log_weight: Float[Tensor, " n"], log_bound: float) -> Divergence:
    """The equations above, with the mean over n draws for E_q."""
    n, cut = len(log_weight), log_weight.clamp(max=log_bound)
    log_z, log_z_cut = _log_mean(log_weight), _log_mean(cut)
    p, p_cut = (log_weight - log_z).exp(), (cut - log_z_cut).exp()  # P/q and P_β/q
    more = p > p_cut
    tv = float((p - p_cut)[more].sum()) / n
    # what one more draw moves: its own term, and Z and Z_β in all the terms
    moves = (p - p_cut).clamp(min=0) - tv - (p * more).mean() * (p - 1) + (p_cut * more).mean() * (p_cut - 1)
    over = (log_weight - log_bound).clamp(min=0)
    return Divergence(
        log_bound=log_bound,
        acceptance=math.exp(log_z_cut - log_bound),
        total_variation=tv,
        standard_error=float((moves.square().mean() / (n - 1)).sqrt()) if n > 1 else math.inf,
        at_most=max(0.0, -math.expm1(log_z_cut - log_z)),
        kl=max(0.0, log_z_cut - log_z + float((p * over).mean())),
    )


def bound_for_acceptance(log_weight: Float[Tensor, " n"], acceptance: float) -> float:
    """The log of the bound at which this share of proposals is accepted."""
    there = log_weight[log_weight > -torch.inf]
    if acceptance > len(there) / len(log_weight):
        raise UserError(
            f"an acceptance of {acceptance:g} cannot be reached: {len(there)} of {len(log_weight)} proposals have any "
            "weight; ask for less"
        )
    # Z_β/β is the share with any weight at the smallest of them, and below w_max/β
    low, high = float(there.min()), float(there.max()) - math.log(acceptance)
    return _root(lambda s: _log_mean(log_weight.clamp(max=s)) - s - math.log(acceptance), low, high)


def bound_for_distance(log_weight: Float[Tensor, " n"], distance: float) -> float:
    """The log of the smallest bound at which the total variation is no more than this."""
    there = log_weight[log_weight > -torch.inf]
    low, high = float(there.min()), float(there.max())
    return _root(lambda s: divergence(log_weight, s).total_variation - distance, low, high)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is zero; the lower end where it is below zero already, the upper where never."""
    if falling(low) <= 0:
        return low
    return high if falling(high) >= 0 else float(brentq(falling, low, high, xtol=1e-13))  # equal weights: by rounding


def _log_mean(log_weight: Float[Tensor, " n"]) -> float:
    return float(log_weight.logsumexp(0)) - math.log(len(log_weight))
