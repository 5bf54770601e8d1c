"""From states to a number.

    E = w · pool(h) + b,      pool(h) = Σ h   or   Σ h / (how many),      w = 0 and b = 0 at the start

The sum runs over the real tokens of the continuation, or of prefix and continuation. Over nothing it is 0, so E = b.
"""

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from freenergy.energies.settings import Over, Pool
from freenergy.energies.trunk import States


@final
class Readout(nn.Module):
    """A linear map of pooled states; it starts at zero, and so does the energy."""

    def __init__(self, width: int, *, pool: Pool, over: Over, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.pool, self.over = pool, over
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, states: States) -> Float[Tensor, "B N"]:
        """Compute one number per continuation."""
        total, count = _sum(states.x, states.mask), states.mask.sum(-1)
        if self.over == "all":
            total = total + _sum(states.prefix, states.prefix_mask)
            count = count + states.prefix_mask.sum(-1)
        if self.pool == "mean":
            total = total / count.clamp(min=1).unsqueeze(-1)
        return nn.functional.linear(total, self.weight, self.bias).squeeze(-1)


def _sum(states: Float[Tensor, "B N L H"], mask: Bool[Tensor, "B N L"]) -> Float[Tensor, "B N H"]:
    return (states * mask.unsqueeze(-1)).sum(2)
