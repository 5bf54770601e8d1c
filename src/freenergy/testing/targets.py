"""The contracts of ``Sampler``, ``Kernel`` and ``PartitionEstimator``, by walking every random branch.

check_sampler:      law of one result = P, or within a stated distance of it
check_kernel:       Σ_x P(x) K(x, y) = P(y),    K(x, y) = the law of one step from x
check_estimator:    E[Ẑ] = Z,    E[lower] ≤ log Z,    lower ≤ jackknife ≤ upper,    Z = Σ_x exp(log_score(c, x))
"""

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Kernel, Model, PartitionEstimator, Target
from freenergy.core.sequences import Sequences
from freenergy.models.residual import Residual
from freenergy.partition.estimate import LogPartition
from freenergy.samplers.sampled import Sampled, Sampler
from freenergy.testing.enumerating import as_vector, assert_close, branches, everything, law

ROUNDING = 1e-9
NUM = 6  # results or chains in checks with real random numbers


def check_sampler(
    sampler: Sampler,
    target: Target[Residual],
    *,
    probs: Float[Tensor, " strings"] | None = None,
    within: float = 1e-12,
    is_enumerable: bool = True,
) -> None:
    """Check every law of ``Sampler`` on one context.

    The law of one result is ``probs`` in the order of ``space.enumerate()`` (P of the target where not given), within a
    total variation of ``within``; branches that are refused for their budget do not count. ``is_enumerable=False``
    skips the law, for samplers that need more draws than can be walked.
    """
    assert isinstance(sampler, Sampler), f"{type(sampler).__name__} does not play the role of a sampler"
    if is_enumerable:
        P = _probs(target) if probs is None else probs
        tv = float((law_of_sampler(sampler, target) - P).abs().sum() / 2)
        assert tv <= within, f"the law of a result is {tv:.2e} from its target in total variation, more than {within:g}"
    found = sampler(target, NUM, Rng(1))
    _check_results(found, target)
    _same(found, sampler(target, NUM, Rng(1)), "the same rng gives other results")
    others = (sampler(target, NUM, Rng(seed)).x.lists() for seed in range(2, 22))
    assert any(strings != found.x.lists() for strings in others), "another rng gives the same results"
    for other in _other_batch_sizes(sampler):
        _same(found, other(target, NUM, Rng(1)), f"another batch size gives other results: {other}")
    two = target.after(Sequences.from_lists(target.contexts.lists() * 2))
    for bad, num, sentence in ((two, 1, "2 contexts were given"), (target, 0, "0 results were asked for")):
        assert sentence in _refusal(sampler, bad, num), f"{num} results of {len(bad)} contexts are not refused"


def _refusal(sampler: Sampler, target: Target[Residual], num: int) -> str:
    try:
        sampler(target, num, Rng(1))
    except UserError as error:
        return str(error)
    return ""


def _other_batch_sizes(settings: Any) -> list[Sampler]:
    if not (is_dataclass(settings) and "batch_size" in {field.name for field in fields(settings)}):
        return []
    return [replace(cast(Any, settings), batch_size=batch_size) for batch_size in (1, 3, 100)]


def law_of_results(sampler: Sampler, target: Target[Residual], num: int = 1) -> dict[Any, float]:
    """Return the exact law of the results: of one string, or of a tuple of them; "refused" where there are none."""

    def run(rng: Rng) -> Any:
        try:
            strings = [tuple(string) for string in sampler(target, num, rng).x.lists()[0]]
        except UserError:
            return "refused"
        return strings[0] if num == 1 else tuple(strings)

    return law(run, lambda found: found)


def law_of_sampler(sampler: Sampler, target: Target[Residual]) -> Float[Tensor, " strings"]:
    """Return the exact law of one result, given that there is one."""
    found = _vector(law_of_results(sampler, target), target)
    assert found.sum() > 0, "every branch is refused"
    return found / found.sum()


def check_kernel(
    kernel: Kernel[Any],
    target: Target[Residual],
    *,
    probs: Float[Tensor, " strings"] | None = None,
    is_reversible: bool = True,
    tolerance: float = 1e-12,
) -> None:
    """Check every law of ``Kernel`` on one context: P K = P, and chains that keep to themselves.

    P is ``probs`` in the order of ``space.enumerate()``, or that of the target. ``is_reversible`` asks for detailed
    balance too.
    """
    assert isinstance(kernel, Kernel), f"{type(kernel).__name__} does not play the role of a kernel"
    P = _probs(target) if probs is None else probs
    K = transition_matrix(kernel, target, P > 0)
    assert_close(K.sum(1)[P > 0], torch.ones_like(P)[P > 0], tolerance, "each row of K sums to one")
    assert_close(P @ K, P, tolerance, "the target is invariant, P K = P")
    if is_reversible:
        flow = P.unsqueeze(1) * K
        assert_close(flow, flow.T, tolerance, "detailed balance, P(x) K(x, y) = P(y) K(y, x)")
    _check_chains(kernel, target, Rng(1).categorical(P.log().expand(NUM, -1)))


def transition_matrix(
    kernel: Kernel[Any], target: Target[Residual], starts: Tensor | None = None
) -> Float[Tensor, "strings strings"]:
    """Return K, row by row; rows outside of ``starts`` stay zero."""
    x = everything(target.contexts.lists(), target.space)
    K = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for i in range(x.shape[1]) if starts is None else starts.nonzero().flatten().tolist():
        state = kernel.init(target, x.candidates(torch.tensor([i])))
        assert state.x.lists()[0] == [x.lists()[0][i]], "init does not keep the position"

        def step(rng: Rng, state: Any = state) -> tuple[int, ...]:
            return tuple(kernel.step(target, state, rng)[0].x.lists()[0][0])

        K[i] = _vector(law(step, lambda string: string), target)
    return K


def _check_chains(kernel: Kernel[Any], target: Target[Residual], places: Tensor) -> None:
    """Chain n draws from candidate n of the stream, whatever chains are around it; who stays is reported."""
    x = everything(target.contexts.lists(), target.space).candidates(places)
    before = kernel.init(target, x)
    assert before.x.lists() == x.lists(), "init does not keep the positions"
    for t in range(5):
        rng = Rng(3).child("step", t)
        after, info = kernel.step(target, before, rng)
        strings, old = after.x.lists()[0], before.x.lists()[0]
        assert len(info.is_accepted) == len(strings) == NUM, "a step reports and keeps every chain"
        assert info.base_tokens >= 0, "a cost is not negative"
        assert all(new == was for new, was, ok in zip(strings, old, info.is_accepted, strict=True) if not ok), (
            "a chain that did not accept has moved"
        )
        for n in range(NUM):
            alone = kernel.init(target, before.x.candidates(torch.tensor([n])))
            own = kernel.step(target, alone, rng.shift(candidates=n))[0].x.lists()[0]
            assert own == [strings[n]], f"chain {n} moves otherwise when it is alone: chains must own their randomness"
        before = after


def _check_results(found: Sampled, target: Target[Residual]) -> None:
    assert found.x.shape == (1, NUM), f"{NUM} results of one context have shape {found.x.shape}"
    again = target.model.scored(found.x, allow_inf=True)
    assert_close(found.log_base, again.log_base, 1e-9, "log_base is that of the results")
    assert_close(found.energy, again.energy, 1e-9, "energy is that of the results")
    assert found.distance is None or 0 <= found.distance <= 1, f"a distance of {found.distance}"
    assert found.base_tokens >= 0, "a cost is not negative"


def _same(found: Sampled, other: Sampled, otherwise: str) -> None:
    assert found.x.lists() == other.x.lists(), otherwise
    assert torch.equal(found.energy, other.energy), otherwise


def _probs(target: Target[Residual]) -> Float[Tensor, " strings"]:
    """P(x | c) of every string, by the sum over all of them."""
    return _log_scores(target)[0].softmax(0)


def _vector(found: dict[Any, float], target: Target[Residual]) -> Float[Tensor, " strings"]:
    names = [tuple(string) for string in target.space.enumerate().lists()]
    return as_vector({name: p for name, p in found.items() if name != "refused"}, names)


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
    log_z = _log_scores(target).logsumexp(1)
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


def _log_scores(target: Target[Model]) -> Float[Tensor, "B strings"]:
    with torch.no_grad():
        return target.model.log_score(everything(target.contexts.lists(), target.space)).double().cpu()
