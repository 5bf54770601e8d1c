"""The recursions in log space and float64: exact for any numbers, differentiable as often as one likes.

    a_1 = x_1,     a_t(k) = x_t(k) + lse_j( a_{t−1}(j) + A_jk ),        log Z = lse_k a_L(k)
    b_L = 0,       b_t(j) = lse_k( A_jk + x_{t+1}(k) + b_{t+1}(k) )
    p(y_t = k) = exp(a_t(k) + b_t(k) − log Z)
    p(y_{t−1} = j, y_t = k) = exp(a_{t−1}(j) + A_jk + x_t(k) + b_t(k) − log Z)

The fast recursions (``plain``, ``kernels``) fall back on these where their range does not suffice.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.structured.potentials import INF, Potentials


def lse(values: Tensor, dim: int) -> Tensor:
    """Return log Σ exp; −inf where every term is, with gradients of 0 there instead of NaN."""
    top = values.detach().amax(dim, keepdim=True)
    top = torch.where(top > -INF, top, 0.0)
    total = (values - top).exp().sum(dim)
    is_zero = total == 0
    return torch.where(is_zero, -INF, torch.where(is_zero, 1.0, total).log() + top.squeeze(dim))


def alphas(p: Potentials) -> Float[Tensor, "B T K"]:
    """Return a_t; beyond its end a row keeps its last one."""
    x, A = p.dense()
    steps = [x[:, 0]]
    for t in range(1, p.positions.T):
        a = x[:, t] + lse(steps[-1].unsqueeze(-1) + step(A, t), 1)
        steps.append(a if p.positions.is_full else torch.where((t < p.positions.lengths).unsqueeze(-1), a, steps[-1]))
    return torch.stack(steps, 1)


def betas(p: Potentials) -> Float[Tensor, "B T K"]:
    """Return b_t; 0 at and beyond the last position of a row."""
    x, A = p.dense()
    steps = [torch.zeros_like(x[:, 0])]
    for t in range(p.positions.T - 1, 0, -1):
        b = lse(step(A, t) + (x[:, t] + steps[-1]).unsqueeze(1), 2)
        steps.append(b if p.positions.is_full else torch.where((t < p.positions.lengths).unsqueeze(-1), b, steps[-1]))
    return torch.stack(steps[::-1], 1)


def log_partition(p: Potentials) -> Float[Tensor, " B"]:
    """Return log Z; 0 for a row without positions, whose one tagging is the empty one."""
    return torch.where(p.positions.lengths > 0, lse(alphas(p)[:, -1], 1), 0.0)


def marginals(p: Potentials) -> Float[Tensor, "B T K"]:
    """Return p(y_t = k), packed; 0 beyond a row's end."""
    a = alphas(p)
    log_p = a + betas(p) - lse(a[:, -1], 1)[:, None, None]
    return torch.where(p.positions.kept.unsqueeze(-1), log_p.exp(), 0.0)


def pair_marginals(p: Potentials) -> Float[Tensor, "B T1 K K"]:
    """Return p(y_{t−1} = j, y_t = k) for t = 2 … T, packed; 0 beyond a row's end."""
    x, A = p.dense()
    a = alphas(p)
    after = (x + betas(p))[:, 1:] - lse(a[:, -1], 1)[:, None, None]
    log_p = a[:, :-1].unsqueeze(-1) + A + after.unsqueeze(2)
    return torch.where(p.positions.kept[:, 1:, None, None], log_p.exp(), 0.0)


def step(A: Tensor, t: int) -> Tensor:
    """Return the matrix of the step into position t, counted from 0."""
    return A if A.dim() == 2 else A[:, t - 1]
