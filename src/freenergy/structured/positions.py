"""Which positions of a padded batch count: a mask takes positions out, wherever they are.

    mask [B, T]  →  order [B, T]: the kept positions first, in their order;   lengths [B]: how many are kept

Potentials are brought into that order before the sums and results are brought back after them, so a hole in the mask is
exactly the sequence without that token. The step into a kept position t comes from the kept position before it and uses
the transition that belongs to t.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.structured.distribution import NO_LABEL


@final
@dataclass(frozen=True, slots=True)
class Positions:
    """The kept positions of B rows. ``order`` is None where every row is a plain prefix."""

    B: int
    T: int
    lengths: Int[Tensor, " B"]
    is_full: bool
    order: Int[Tensor, "B T"] | None

    @property
    def kept(self) -> Bool[Tensor, "B T"]:
        """Return which of the ordered positions are inside of their row."""
        return torch.arange(self.T, device=self.lengths.device) < self.lengths.unsqueeze(1)

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        """Return which of the caller's positions count."""
        return self.unpack(self.kept.long()).bool()

    def pack(self, values: Tensor) -> Tensor:
        """Bring [B, T, …] into the order of kept positions."""
        if self.order is None:
            return values
        index = self.order.view(self.B, self.T, *[1] * (values.dim() - 2)).expand_as(values)
        return values.gather(1, index)

    def pack_steps(self, values: Tensor) -> Tensor:
        """The same for [B, T − 1, …], whose entry t − 1 belongs to the step into position t."""
        if self.order is None:
            return values
        steps = (self.order[:, 1:] - 1).clamp(min=0)
        return values.gather(1, steps.view(self.B, self.T - 1, *[1] * (values.dim() - 2)).expand_as(values))

    def unpack(self, values: Tensor, fill: float | int = 0) -> Tensor:
        """Bring [B, T, …] back to the positions of the caller, with ``fill`` where a position is masked out."""
        kept = self.kept.view(self.B, self.T, *[1] * (values.dim() - 2))
        values = values if self.is_full else torch.where(kept, values, fill)
        if self.order is None:
            return values
        index = self.order.view(self.B, self.T, *[1] * (values.dim() - 2)).expand_as(values)
        return torch.full_like(values, fill).scatter(1, index, values)

    def unpack_steps(self, values: Tensor) -> Tensor:
        """The same for [B, T − 1, …]."""
        first = torch.zeros_like(values[:, :1]) if self.T > 1 else values.new_zeros(self.B, 1, *values.shape[2:])
        return self.unpack_shifted(torch.cat([first, values], 1))

    def unpack_shifted(self, values: Tensor) -> Tensor:
        """Unpack steps that were put at the positions they lead to; nothing leads to a row's first one."""
        return self.unpack(values)[:, 1:]

    def rows(self, rows: Int[Tensor, " R"]) -> "Positions":
        """Return some of the rows, which are packed already."""
        lengths = self.lengths[rows]
        return Positions(len(rows), self.T, lengths, bool((lengths == self.T).all()), None)

    def unpack_labels(self, labels: Int[Tensor, "B num T"]) -> Int[Tensor, "B num T"]:
        """Bring labels back to the positions of the caller."""
        return self.unpack(labels.transpose(1, 2), NO_LABEL).transpose(1, 2)


def positions(B: int, T: int, lengths: Tensor | None, mask: Tensor | None, device: torch.device) -> Positions:
    """Read the kept positions off lengths or a mask, whichever is given."""
    if lengths is not None and mask is not None:
        raise UserError("lengths and mask are both given: give one of them")
    if mask is not None:
        return _from_mask(B, T, mask.to(device))
    if lengths is None:
        return Positions(B, T, torch.full((B,), T, device=device), True, None)
    if lengths.shape != (B,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise UserError(f"lengths are {_kind(lengths)}: give {B} whole numbers, one per sequence")
    lengths = lengths.to(device=device, dtype=torch.long)
    if B and not 0 <= int(lengths.min()) <= int(lengths.max()) <= T:
        raise UserError(f"lengths run from {int(lengths.min())} to {int(lengths.max())}: emissions have {T} positions")
    return Positions(B, T, lengths, bool((lengths == T).all()), None)


def _from_mask(B: int, T: int, mask: Tensor) -> Positions:
    if mask.shape != (B, T):
        raise UserError(f"the mask is {_kind(mask)}: give one entry per position, [{B}, {T}]")
    mask = mask.bool()
    lengths = mask.sum(1)
    if bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return Positions(B, T, lengths, bool((lengths == T).all()), None)
    return Positions(B, T, lengths, False, (~mask).int().argsort(dim=1, stable=True))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
