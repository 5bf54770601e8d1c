"""log Z of linear chains by the fastest recursion whose range suffices, with gradients of any order.

    compiled or plain, in the type of the input  →  rows out of range: the same in float64  →  still out: in log space

The backward pass is the recursion's own and keeps no graph. A gradient of a gradient (``create_graph=True``) is taken
by autograd through the recursion in log space.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freenergy.structured import kernels, log_space
from freenergy.structured.allowed import Allowed
from freenergy.structured.plain import BAD, FINE, OUT_OF_RANGE, ChainGradients, PlainChains
from freenergy.structured.potentials import INF, Potentials


def log_partition(p: Potentials) -> Tensor:
    """Return log Z [B] in the type of the potentials; −inf where nothing is allowed."""
    x, A, start, end = folded(p)
    log_z: Tensor = _LogPartition.apply(x, A, start, end, p)  # type: ignore[no-untyped-call]
    return log_z


def marginals(p: Potentials) -> Tensor:
    """Return p(y_t = k) [B, T, K], packed. They are differentiable where the potentials are."""
    if p.needs_grad:
        return log_space.marginals(p).to(p.emissions.dtype)
    x, A, start, end = detached(p)
    with torch.enable_grad():
        x = x.requires_grad_()
        log_z: Tensor = _LogPartition.apply(x, A, start, end, p)  # type: ignore[no-untyped-call]
        return torch.autograd.grad(log_z.sum(), x)[0]


def detached(p: Potentials) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the same without gradients."""
    x, A, start, end = folded(p)
    return x.detach(), A.detach(), None if start is None else start.detach(), None if end is None else end.detach()


def folded(p: Potentials) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the potentials with −inf where a boolean forbids, start and end of shape [K]."""
    a, x, A = p.allowed, p.emissions, p.transitions
    start, end = p.start, p.end
    if start is not None and start.dim() == 2:
        x, start = torch.cat([x[:, :1] + start.unsqueeze(1), x[:, 1:]], 1), None
    if end is not None and end.dim() == 2:
        x, end = torch.where(p.last().unsqueeze(-1), x + end.unsqueeze(1), x), None
    x = x if a.labels is None else torch.where(a.labels, x, -INF)
    A = A if a.pairs is None else torch.where(a.pairs, A, -INF)
    return x, A, _forbidden(start, a.start, x), _forbidden(end, a.end, x)


def _forbidden(values: Tensor | None, allowed: Tensor | None, x: Tensor) -> Tensor | None:
    if allowed is None:
        return values
    return torch.where(allowed, x.new_zeros(()) if values is None else values, -INF)


def recursion(p: Potentials, A: Tensor) -> "PlainChains | kernels.CompiledChains":
    """Return the compiled recursion where it can be used, else the one in plain torch."""
    is_compiled = p.compiled and p.emissions.device.type == "cpu" and A.dim() == 2
    return (kernels.kernels() if is_compiled else None) or PlainChains()


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, p: Potentials) -> Tensor:
        ctx.p, ctx.recursion, ctx.redone = p, recursion(p, A), None
        sums = ctx.recursion.forward(x, A, start, end, p.positions.lengths)
        log_z, worst = sums.log_z, int(sums.status.max()) if len(x) else FINE
        if worst == BAD:
            p.refuse_bad_numbers()
        if worst != FINE and bool((sums.status == OUT_OF_RANGE).any()):
            ctx.redone = _again(x, A, start, end, p, (sums.status == OUT_OF_RANGE).nonzero().flatten())
            rows, _, again = ctx.redone
            log_z = log_z.index_copy(0, rows, again.detach().double())
        ctx.sums = sums
        ctx.save_for_backward(x, A, start, end)
        found: Tensor = log_z.to(x.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, A, start, end = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller will differentiate again
            return *_by_autograd(x, A, start, end, ctx.p, grad), None
        g = ctx.recursion.backward(x, A, start, end, ctx.p.positions.lengths, ctx.sums, grad)
        if ctx.redone is not None:
            rows, leaves, log_z = ctx.redone
            g = _with_redone(g, rows, leaves, log_z, grad)
        return g.x, g.A, None if start is None else g.start, None if end is None else g.end, None


def _again(
    x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, p: Potentials, rows: Tensor
) -> tuple[Tensor, list[Tensor | None], Tensor]:
    """Take log Z of some rows once more: in float64, or in log space if it was float64 already."""
    leaves = [x[rows], A if A.dim() == 2 else A[rows], start, end]
    leaves = [t if t is None else t.detach().double().requires_grad_() for t in leaves]
    some = replace(p, positions=p.positions.rows(rows))
    with torch.enable_grad():
        if x.dtype == torch.float64:
            return rows, leaves, log_space.log_partition(_free(leaves, some))
        again: Tensor = _LogPartition.apply(*leaves, _free(leaves, some))  # type: ignore[no-untyped-call]
        return rows, leaves, again


def _free(tensors: list[Tensor | None], p: Potentials) -> Potentials:
    """Return potentials whose constraints are in the numbers already."""
    x, A, start, end = tensors
    assert x is not None
    assert A is not None
    return Potentials(x, A, start, end, Allowed(), p.positions, p.compiled)


def _by_autograd(
    x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, p: Potentials, grad: Tensor
) -> list[Tensor | None]:
    inputs = [x, A, start, end]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    log_z = log_space.log_partition(_free(inputs, p))
    found = iter(torch.autograd.grad(log_z, wanted, grad.double(), create_graph=True, materialize_grads=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def _with_redone(
    g: ChainGradients, rows: Tensor, leaves: list[Tensor | None], log_z: Tensor, grad: Tensor
) -> ChainGradients:
    """Add the gradients of the rows that were done again."""
    given = [t for t in leaves if t is not None]
    found = iter(
        torch.autograd.grad(log_z, given, grad[rows].to(log_z.dtype), retain_graph=True, materialize_grads=True)
    )
    dx, dA, d_start, d_end = (None if t is None else next(found) for t in leaves)
    assert dx is not None
    assert dA is not None
    return ChainGradients(
        g.x.index_copy(0, rows, dx.to(g.x.dtype)),
        g.A + dA.to(g.A.dtype) if g.A.dim() == 2 else g.A.index_copy(0, rows, dA.to(g.A.dtype)),
        g.start if d_start is None else g.start + d_start.to(g.start.dtype),
        g.end if d_end is None else g.end + d_end.to(g.end.dtype),
    )
