"""The contract of ``PartitionEstimator``, by walking every random branch on a space that can be enumerated.

E[Ẑ] = Z,    E[lower] ≤ log Z,    lower ≤ jackknife ≤ upper,    Z = Σ_x exp(log_score(c, x))
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, PartitionEstimator, Target
from freenergy.core.sequences import Sequences
from freenergy.partition.estimate import LogPartition
from freenergy.testing.comparing import assert_close, everything
from freenergy.testing.enumerating import branches

ROUNDING = 1e-9


def check_estimator(
    estimator: PartitionEstimator[LogPartition],
    target: Target[Model],
    *,
    is_exact: bool = False,
    is_unbiased: bool = True,
    tolerance: float = 1e-12,
) -> None:
    """Check every law of ``PartitionEstimator`` on a target with one context or more.

    ``is_exact`` asks for log Z itself. ``is_unbiased`` walks every random branch of the first context, so let the
    estimator make few draws; leave it out for estimators that promise no E[Ẑ] = Z.
    """
    assert isinstance(estimator, PartitionEstimator), f"{type(estimator).__name__} does not estimate log Z"
    log_z = _log_partition(target)
    if is_exact:
        found = estimator(target, Rng(1))
        for name in ("lower", "upper", "jackknife"):
            assert_close(getattr(found, name), log_z, tolerance, f"{name} is log Z")
    elif is_unbiased:
        _check_mean(estimator, target[:1], float(log_z[0]), tolerance)
    _check_contexts(estimator, target)
    try:
        estimator(target.after(Sequences.from_lists([])), Rng(1))
    except UserError:
        return
    raise AssertionError("log Z of no contexts is not refused")


def _check_mean(
    estimator: PartitionEstimator[LogPartition], target: Target[Model], log_z: float, tolerance: float
) -> None:
    found = [(p, float(Z.lower)) for p, Z in branches(lambda rng: estimator(target, rng))]
    mean = math.fsum(p * math.exp(lower - log_z) for p, lower in found)
    assert abs(mean - 1) <= tolerance, f"E[Ẑ] is {mean:.6g} times Z, and must be Z"
    mean_log = math.fsum(p * lower for p, lower in found if p > 0)
    assert mean_log <= log_z + ROUNDING, f"E[lower] is {mean_log - log_z:.3g} nats above log Z, and must not be"


def _check_contexts(estimator: PartitionEstimator[LogPartition], target: Target[Model]) -> None:
    """Each context has its own numbers, the same alone as next to others, in the right order."""
    twice = target.after(Sequences.from_lists(target.contexts.lists() * 2))
    found, again = estimator(twice, Rng(1)), estimator(twice, Rng(1))
    assert tuple(found.lower.shape) == (len(twice),), f"{len(twice)} contexts have {tuple(found.lower.shape)} estimates"
    assert torch.equal(found.lower, again.lower), "the same rng gives another estimate"
    for smaller, larger in (("lower", "jackknife"), ("jackknife", "upper")):
        is_below = getattr(found, smaller) <= getattr(found, larger) + ROUNDING
        assert is_below.all(), f"{smaller} is above {larger}"
    for b in range(len(twice)):
        alone = estimator(twice[b : b + 1], Rng(1).shift(contexts=b)).lower
        assert_close(alone, found.lower[b : b + 1], ROUNDING, "a context alone has the same estimate as among others")


def _log_partition(target: Target[Model]) -> Float[Tensor, " B"]:
    with torch.no_grad():
        return target.model.log_score(everything(target.contexts.lists(), target.space)).double().cpu().logsumexp(1)
