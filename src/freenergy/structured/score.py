"""The score of given labellings, as sums of single potentials.

    score(y) = Σ_t φ_t(y_t) + start(y_1) + end(y_L) + Σ_{t ≥ 2} A_t(y_{t−1}, y_t),        −inf where y is not allowed

Every term is looked up in a flat tensor, so that the gradient is a scatter of ones.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.structured.potentials import INF, Potentials


def log_score(p: Potentials, y: Int[Tensor, "B num T"]) -> Float[Tensor, "B num"]:
    """Return the scores of packed labels, which are valid numbers even beyond a row's end."""
    lengths, steps = p.positions.lengths, p.positions.T - 1
    kept = None if p.positions.is_full else p.positions.kept.unsqueeze(1)
    last = y.gather(2, (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(*y.shape[:2], 1))
    some = None if p.positions.is_full else (lengths > 0).view(-1, 1, 1)
    a = p.allowed
    score = _taken(p.emissions, _at(p.emissions, y), kept)
    for values, allowed, index, where in (
        (None, a.labels, y, kept),
        (p.start, a.start, y[..., :1], some),
        (p.end, a.end, last, some),
    ):
        score = score if values is None else score + _taken(values, _at(values, index), where)
        score = score if allowed is None else _closed(score, allowed, _at(allowed, index), where)
    if steps:
        where = None if kept is None else kept[..., 1:]
        score = score + _taken(p.transitions, _at_pair(p.transitions, y), where)
        score = score if a.pairs is None else _closed(score, a.pairs, _at_pair(a.pairs, y), where)
    return score.to(p.emissions.dtype)


def _at(values: Tensor, y: Int[Tensor, "B num T"]) -> Tensor:
    """Return the flat places of labels y in [K], [B, K] or [B, T, K]."""
    K = values.shape[-1]
    if values.dim() == 1:
        return y
    rows = torch.arange(values[..., 0].numel(), device=y.device).view(len(values), 1, -1)
    return rows * K + y


def _at_pair(values: Tensor, y: Int[Tensor, "B num T"]) -> Tensor:
    """Return the flat places of neighbours in [K, K] or [B, T − 1, K, K]."""
    K = values.shape[-1]
    pair = y[..., :-1] * K + y[..., 1:]
    if values.dim() == 2:
        return pair
    return torch.arange(values[..., 0, 0].numel(), device=y.device).view(len(values), 1, -1) * (K * K) + pair


def _taken(values: Tensor, index: Tensor, kept: Tensor | None) -> Tensor:
    taken = values.reshape(-1).gather(0, index.reshape(-1)).view(index.shape)
    return (taken if kept is None else torch.where(kept, taken, 0.0)).sum(-1, dtype=torch.float64)


def _closed(score: Tensor, allowed: Tensor, index: Tensor, kept: Tensor | None) -> Tensor:
    """Return −inf where one of the places is not allowed."""
    taken = allowed.reshape(-1).take(index)
    return torch.where((taken if kept is None else taken | ~kept).all(-1), score, -INF)
