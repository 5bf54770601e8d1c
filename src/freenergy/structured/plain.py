"""The scaled recursion in plain torch, on any device, with its own backward pass.

    W = exp(A − max A),   m_t = max x_t,   s_t = e_{t−1} W,   e_t = s_t · exp(x_t − m_t) / n_t with Σ_k e_t(k) = 1
    log Z = Σ_t (m_t + log n_t) + (L − 1) max A
    p_{L−1} = g e_{L−1},   q_t = p_t / s_t,   p_{t−1} = e_{t−1} · (q_t Wᵀ),   ∂A = W ∘ Σ_t e_{t−1}ᵀ q_t,   ∂x_t = p_t

No logarithm and no exponential is taken inside the loop, and none in the backward pass, whose p_t are the marginals. x
is −inf where a label is forbidden, and A where a pair is. Where all pairs are allowed and A spreads over less than
``SPREAD``, a label that underflows in e cannot matter: its future is at most exp(SPREAD) times better than that of the
others. Otherwise each label that a path can reach is watched, and a row in which one falls below the range is marked.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

FINE, OUT_OF_RANGE, CLOSED, BAD = range(4)  # the status of a row; closed: no path is allowed; bad: NaN or +inf
LEAST_S = {torch.float32: 1e-27, torch.float64: 1e-280}
LEAST_E = {torch.float32: 1e-37, torch.float64: 1e-300}
SPREAD = {torch.float32: 40.0, torch.float64: 300.0}
INF = float("inf")


class ChainSums(NamedTuple):
    """log Z [B] in float64 (−inf where closed), the status of each row, and what the backward pass needs."""

    log_z: Tensor
    status: Tensor
    kept: tuple[Tensor, ...]


class ChainGradients(NamedTuple):
    """ChainGradients of x [B, T, K], A, start [K] and end [K]."""

    x: Tensor
    A: Tensor
    start: Tensor
    end: Tensor


@final
class PlainChains:
    """The recursion in torch. ``A`` is [K, K], or [B, T − 1, K, K] with one matrix per step."""

    def forward(self, x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, lengths: Tensor) -> ChainSums:
        """Return log Z with what the backward pass needs."""
        B, T, _ = x.shape
        kept = torch.arange(T, device=x.device).unsqueeze(1) < lengths  # [T, B]
        is_full = bool(kept.all())
        x = _folded(x, start, end, lengths).transpose(0, 1).contiguous()  # [T, B, K]
        x = x if is_full else torch.where(kept.unsqueeze(-1), x, 0.0)
        top, W = _weights(A)
        m = x.amax(-1, keepdim=True)
        weights = (x - torch.where(m > -INF, m, 0.0)).exp()
        E, S, n = torch.empty_like(weights), torch.ones_like(weights), x.new_empty(T, B, 1)
        w, e, s, sums = weights.unbind(), E.unbind(), S.unbind(), n.unbind()
        torch.sum(w[0], -1, keepdim=True, out=sums[0])
        torch.div(w[0], sums[0], out=e[0])
        for t in range(1, T):
            if A.dim() == 2:
                torch.mm(e[t - 1], W, out=s[t])
            else:
                torch.bmm(e[t - 1].unsqueeze(1), W[:, t - 1], out=s[t].unsqueeze(1))
            torch.mul(s[t], w[t], out=e[t])
            torch.sum(e[t], -1, keepdim=True, out=sums[t])
            e[t].div_(sums[t])
        scale = torch.where(kept, m.squeeze(-1).double() + n.squeeze(-1).double().log(), 0.0).sum(0)
        steps = kept[1:] * top if A.dim() == 2 else torch.where(kept[1:], top.T, 0.0)
        log_z = scale + steps.double().sum(0)
        status = _status(x, A, E, S, n, log_z, kept)
        if not is_full or bool(status.any()):  # nothing of other positions and rows may be added to sums
            E = torch.where((kept & (status == FINE)).unsqueeze(-1), E, 0.0)
        return ChainSums(torch.where(status == CLOSED, -INF, log_z), status, (E, S, W))

    def backward(
        self,
        x: Tensor,
        A: Tensor,
        start: Tensor | None,
        end: Tensor | None,
        lengths: Tensor,
        sums: ChainSums,
        grad: Tensor,
    ) -> ChainGradients:
        """Return the gradients of Σ_b grad_b log Z_b; rows that are not fine count as 0."""
        E, S, W = sums.kept
        T, K = len(E), E.shape[2]
        inverse = S.reciprocal() if bool((W > 0).all()) else torch.where(S > 0, S.reciprocal(), 0.0)
        rows = (lengths > 0).nonzero().flatten()
        P, Q, last = torch.zeros_like(E), torch.empty_like(E), lengths[rows] - 1
        P[last, rows] = ends = E[last, rows] * grad[rows, None].to(E.dtype)
        p, q, e, r = P.unbind(), Q.unbind(), E.unbind(), inverse.unbind()
        across = W.T if W.dim() == 2 else W.transpose(-1, -2)
        for t in range(T - 1, 0, -1):
            torch.mul(p[t], r[t], out=q[t])
            back = torch.mm(q[t], across) if W.dim() == 2 else torch.bmm(q[t].unsqueeze(1), across[:, t - 1]).squeeze(1)
            p[t - 1].addcmul_(e[t - 1], back)
        if W.dim() == 2:
            dA = W * (E[:-1].reshape(-1, K).T @ Q[1:].reshape(-1, K))
        else:
            dA = W * (E[:-1].unsqueeze(-1) * Q[1:].unsqueeze(-2)).transpose(0, 1)
        return ChainGradients(P.transpose(0, 1), dA, P[0].sum(0), ends.sum(0))


def _folded(x: Tensor, start: Tensor | None, end: Tensor | None, lengths: Tensor) -> Tensor:
    """Return x with start at the first and end at the last position of every row."""
    if start is None and end is None:
        return x
    x = x.clone()
    if start is not None:
        x[:, 0] += start
    if end is not None:
        rows = (lengths > 0).nonzero().flatten()
        x[rows, lengths[rows] - 1] += end
    return x


def _weights(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return max A, of each step where there is one matrix per step, and exp(A − max A)."""
    top = A.max() if A.dim() == 2 else A.amax((-2, -1))
    top = torch.where(top > -INF, top, 0.0)
    return top, (A - (top if A.dim() == 2 else top[..., None, None])).exp()


def _status(x: Tensor, A: Tensor, E: Tensor, S: Tensor, n: Tensor, log_z: Tensor, kept: Tensor) -> Tensor:
    """Return the status of each row; x, E and S are [T, B, K], n is [T, B, 1]."""
    status = torch.zeros(len(log_z), dtype=torch.int32, device=x.device)
    is_close = not A.numel() or float(A.max() - A.min()) <= SPREAD[x.dtype]
    if is_close and bool(log_z.isfinite().all()):
        return status
    wrong = ~((x < INF).all(-1) | ~kept).all(0) | ~(A < INF).all()
    if not is_close:
        can = _reachable(x, A)
        raw = E * n  # before it was divided
        lost = can & ((raw < LEAST_E[x.dtype]) | (LEAST_S[x.dtype] > S) | raw.isnan())
        status[(lost.any(-1) & kept).any(0)] = OUT_OF_RANGE
        closed = (~can.any(-1) & kept).any(0)
    else:
        closed = ((x == -INF).all(-1) & kept).any(0)
        status[~log_z.isfinite()] = OUT_OF_RANGE
    status[closed] = CLOSED
    status[wrong] = BAD
    return status


def _reachable(x: Tensor, A: Tensor) -> Tensor:
    """Return which labels a path from the start can have at each position [T, B, K]."""
    allowed, steps = x > -INF, (A > -INF).to(x.dtype)
    can = [allowed[0]]
    for t in range(1, len(x)):
        before = can[-1].to(x.dtype)
        reached = before @ steps if A.dim() == 2 else torch.bmm(before.unsqueeze(1), steps[:, t - 1]).squeeze(1)
        can.append(allowed[t] & (reached > 0))
    return torch.stack(can)
