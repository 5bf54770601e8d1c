"""The residual model token by token (Eq. 5 of Deng et al. 2020).

    log P(x_t | c, x_<t) = log P_LM(x_t | c, x_<t) + log Z(c, x_≤t) − log Z(c, x_<t)
    Z(c, x_≤t) = E over endings from P_LM of e^{−E(c, x)}:      Z(c, ·) at the start, e^{−E(c, x)} at the end

The same estimate of Z(c, x_≤t) closes one step and opens the next, so the steps add up to log P_LM(x) − E(x) − log Ẑ(c)
whatever the draws. A step's lower bound takes the lower estimate above and the upper below; its upper bound the other
way round. Both are as good as the estimates of log Z are (``partition.estimate``).

Endings are stratified by their first token. Where one token is left the draws are distinct tokens with exact weights,
so with as many draws as tokens nothing is left to chance; or the sum over the vocabulary is done (``exact_last``).
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Target
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.energies.call import energies_in_batches
from freenergy.models.residual import Residual
from freenergy.partition.drawing import distinct, log_weights, stratified
from freenergy.partition.exact import after, check_in_space, completed, exact_after
from freenergy.partition.weights import log_partition


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogProbs:
    """log P(x_t | c, x_<t) of each token of one continuation per context; 0 after its end; float64."""

    estimate: Float[Tensor, "B L"]
    lower: Float[Tensor, "B L"]
    upper: Float[Tensor, "B L"]
    log_base: Float[Tensor, "B L"]
    mask: Bool[Tensor, "B L"]


@torch.no_grad()
def step_log_probs(
    model: Residual,
    x: Continuations,
    space: SequenceSpace,
    rng: Rng,
    *,
    draws: int | None,
    exact_last: bool = True,
    at_start: Float[Tensor, "B n"] | None = None,
) -> StepLogProbs:
    """Return every step of x [B, 1] with ``draws`` endings at each position; None sums over all endings.

    ``at_start`` are log-weights of independent draws of the contexts, where there are some already.
    """
    _check(x, space, draws)
    contexts, tokens, lengths = x.contexts, x.tokens[:, 0], x.lengths[:, 0]
    B, L = tokens.shape
    log_base = torch.zeros(B, L, dtype=torch.float64)
    lower, upper = torch.zeros(B, L + 1, dtype=torch.float64), torch.zeros(B, L + 1, dtype=torch.float64)
    ends = torch.arange(L + 1) == lengths.unsqueeze(1)
    lower[ends] = upper[ends] = -energies_in_batches(model.energy, x, allow_inf=True)[:, 0]
    for t in range(int(lengths.max())):
        b = (lengths > t).nonzero().flatten()
        heads, left = tokens[b, :t], replace(space, length=space.length - t)
        log_p = model.base.next_log_probs(after(contexts[b], heads, model.base.eos)).double().cpu()
        log_base[b, t] = log_p.gather(1, tokens[b, t : t + 1])[:, 0]
        if draws is None or (exact_last and left.length == 1):
            lower[b, t] = upper[b, t] = exact_after(Target(model, contexts[b], left), heads)
            continue
        given = at_start is not None and t == 0
        weights = at_start if given else _endings(model, x, b, heads, left, draws, rng.child("step", t))
        assert weights is not None
        found = log_partition(weights)
        lower[b, t], upper[b, t] = found.lower, found.upper
    return _steps(log_base, lower, upper, x.mask[:, 0])


def _endings(
    model: Residual,
    x: Continuations,
    b: Int[Tensor, " going"],
    heads: Int[Tensor, "going t"],
    left: SequenceSpace,
    draws: int,
    rng: Rng,
) -> Float[Tensor, "going n"]:
    """Return log-weights of drawn endings of the contexts b; each draws as if no other had ended."""
    draw, found = distinct if left.length == 1 else stratified, []
    gaps = (b.diff() > 1).nonzero().flatten() + 1
    for some, head in zip(b.tensor_split(gaps), heads.tensor_split(gaps), strict=True):
        contexts = x.contexts[some]
        stream = rng.shift(contexts=int(some[0]))
        drawn = draw(model.base, after(contexts, head, model.base.eos), draws, left, stream)
        found.append(log_weights(model.energy, replace(drawn, x=completed(contexts, head, drawn.x))))
    return torch.cat(found)


def _steps(
    log_base: Float[Tensor, "B L"],
    lower: Float[Tensor, "B places"],
    upper: Float[Tensor, "B places"],
    mask: Bool[Tensor, "B L"],
) -> StepLogProbs:
    def steps(above: Tensor, below: Tensor) -> Tensor:
        return torch.where(mask, log_base + above[:, 1:] - below[:, :-1], 0.0)

    return StepLogProbs(
        estimate=steps(lower, lower),
        lower=steps(lower, upper),
        upper=steps(upper, lower),
        log_base=log_base,
        mask=mask,
    )


def _check(x: Continuations, space: SequenceSpace, draws: int | None) -> None:
    if x.shape[1] != 1:
        raise UserError(f"{x.shape[1]} continuations per context: give one, steps are those of one text")
    if draws is not None and draws < 2:
        raise UserError(f"the upper estimate needs at least two draws per context, not {draws}: set draws to 2 or more")
    check_in_space(x, space)
