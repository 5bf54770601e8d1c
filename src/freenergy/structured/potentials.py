"""The numbers of a batch of chains, checked, in the order of kept positions.

    score(y) = Σ_t φ_t(y_t) + start(y_1) + end(y_L) + Σ_{t ≥ 2} A_t(y_{t−1}, y_t),        −inf where y is not allowed

``dense`` folds all of it into two tensors: x [B, T, K] and A, with −inf at what is forbidden.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.structured.allowed import Allowed
from freenergy.structured.positions import Positions

INF = float("inf")


@final
@dataclass(frozen=True, slots=True)
class Potentials:
    """Potentials of B chains: float32 or float64, packed. ``transitions`` is [K, K], or [B, T − 1, K, K]."""

    emissions: Float[Tensor, "B T K"]
    transitions: Float[Tensor, "*steps K K"]
    start: Float[Tensor, "*B K"] | None
    end: Float[Tensor, "*B K"] | None
    allowed: Allowed
    positions: Positions
    compiled: bool = True

    @property
    def needs_grad(self) -> bool:
        """Whether autograd follows any of the potentials."""
        tensors = (self.emissions, self.transitions, self.start, self.end)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def last(self) -> Bool[Tensor, "B T"]:
        """Return where a row's last kept position is."""
        device = self.emissions.device
        return torch.arange(self.positions.T, device=device) == self.positions.lengths.unsqueeze(1) - 1

    def label_sets(self) -> Bool[Tensor, "B T K"] | None:
        """Return the labels that each position may have, start and end included; None where all are allowed."""
        a, shape = self.allowed, self.emissions.shape
        if a.start is None and a.end is None and a.labels is None:
            return None
        ok = torch.ones(shape, dtype=torch.bool, device=self.emissions.device) if a.labels is None else a.labels.clone()
        if a.start is not None:
            ok[:, 0] &= a.start
        if a.end is not None:
            ok &= a.end | ~self.last().unsqueeze(-1)
        return ok

    def dense(self) -> tuple[Float[Tensor, "B T K"], Float[Tensor, "*steps K K"]]:
        """Return x and A in float64, differentiable, −inf where forbidden and 0 at positions beyond a row's end."""
        x, A = self.emissions.double(), self.transitions.double()
        if self.start is not None:
            first = (torch.arange(self.positions.T, device=x.device) == 0).view(1, -1, 1)
            x = torch.where(first, x + _by_row(self.start).double(), x)
        if self.end is not None:
            x = torch.where(self.last().unsqueeze(-1), x + _by_row(self.end).double(), x)
        ok = self.label_sets()
        x = x if ok is None else torch.where(ok, x, -INF)
        x = x if self.positions.is_full else torch.where(self.positions.kept.unsqueeze(-1), x, 0.0)
        return x, A if self.allowed.pairs is None else torch.where(self.allowed.pairs, A, -INF)

    def refuse_bad_numbers(self) -> None:
        """Raise for the first potential that is NaN or +inf at a position that counts."""
        where = self.positions.kept.unsqueeze(-1)
        bad = {"emissions": (~(self.emissions < INF) & where).any(), "transitions": (~(self.transitions < INF)).any()}
        bad |= {name: (~(t < INF)).any() for name, t in (("start", self.start), ("end", self.end)) if t is not None}
        for name, found in bad.items():
            if bool(found):
                raise UserError(f"{name} contain NaN or +inf: the network that made them has diverged, or overflowed")


def _by_row(values: Tensor) -> Tensor:
    """[K] or [B, K] as something that broadcasts with [B, T, K]."""
    return values.unsqueeze(-2) if values.dim() == 2 else values


def potentials(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    allowed: Allowed,
    positions: Positions,
    compiled: bool = True,
) -> Potentials:
    """Check shapes, bring everything to one type and into the order of kept positions."""
    B, T, K = emissions.shape
    steps, ends = ((K, K), (T - 1, K, K), (B, T - 1, K, K)), ((K,), (B, K))
    check_shape("transitions", transitions, steps)
    check_shape("start", start, ends)
    check_shape("end", end, ends)
    check_shape("allowed.pairs", allowed.pairs, steps)
    check_shape("allowed.start", allowed.start, ends[:1])
    check_shape("allowed.end", allowed.end, ends[:1])
    check_shape("allowed.labels", allowed.labels, ((B, T, K),))
    dtype = torch.float64 if emissions.dtype == torch.float64 else torch.float32
    return Potentials(
        positions.pack(emissions.to(dtype)),
        _steps(transitions.to(dtype), positions),
        None if start is None else start.to(dtype),
        None if end is None else end.to(dtype),
        allowed if allowed.is_free else _placed(allowed, positions, emissions.device),
        positions,
        compiled,
    )


def check_shape(name: str, values: Tensor | None, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Refuse a tensor that has none of the shapes."""
    if values is not None and values.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise UserError(f"{name} has the shape {list(values.shape)}: with these emissions it is {wanted}")


def _placed(allowed: Allowed, positions: Positions, device: torch.device) -> Allowed:
    pairs, start, end, labels = allowed.pairs, allowed.start, allowed.end, allowed.labels
    return Allowed(
        pairs=None if pairs is None else _steps(pairs.to(device), positions),
        start=None if start is None else start.to(device),
        end=None if end is None else end.to(device),
        labels=None if labels is None else positions.pack(labels.to(device)),
    )


def _steps(values: Tensor, positions: Positions) -> Tensor:
    """[K, K] as it is; per-position matrices as [B, T − 1, K, K], packed."""
    if values.dim() == 2:
        return values
    return positions.pack_steps(values.expand(positions.B, *values.shape[-3:]))
