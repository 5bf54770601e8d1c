"""Gated PixelCNN: two stacks, so that every earlier pixel is seen.

    v(i, j) = the rows above i,   w = k×k(v),                v ← tanh(w_1) · σ(w_2)
    h(i, j) = the pixels before,  u = 1×k(h) + 1×1(w),       h ← h + 1×1(tanh(u_1) · σ(u_2))       (the first: no h +)

(van den Oord, Kalchbrenner, Vinyals, Espeholt, Graves, Kavukcuoglu 2016, Conditional Image Generation with PixelCNN
Decoders, figure 2.) Here v at row i depends on the rows above i only, where the paper's depends on row i and is then
moved down by one: the same network, except for what stands beyond the upper border, and no map is moved. Its first
convolution, 7 wide, sees the three rows above, and so may all later ones see v of their own row.
"""

from collections.abc import Sequence
from typing import cast, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.apps.images.masked_convolution import ConvolutionCache, MaskedConvolution, channel_of
from freenergy.apps.images.pixelcnn import Head, ImageShape, PixelModule
from freenergy.core.errors import UserError

_FIRST = 7  # the size of the first convolution
_GAIN = 2.5  # times torch's initial weights: a gate passes a third of the signal, which would vanish in deep stacks


@final
class GatedPixelCNN(PixelModule):
    """``blocks`` layers of two stacks with p = ``features`` maps each, after a first layer of 7 × 7."""

    def __init__(self, shape: ImageShape, *, blocks: int, features: int, head: int, kernel: int = 3) -> None:
        super().__init__(shape)
        if kernel < 3 or kernel % 2 == 0:
            raise UserError(f"kernel is {kernel}: set it to 3, 5 or another odd number")
        self.layers = nn.ModuleList(
            _Layer(features, shape.channels, kernel if later else _FIRST, is_first=not later)
            for later in range(blocks + 1)
        )
        self.head = Head(features, head, shape)
        self.reach = _FIRST // 2 + blocks * (kernel // 2)
        first = self._stack()[0]
        self.readers = (first.vertical, first.horizontal)

    def above(self, x: Float[Tensor, "rows channels h w"], memory: ConvolutionCache | None = None) -> list[Tensor]:
        """Return 1×1(w) of every layer."""
        v, said = x, []
        for layer in self._stack():
            w = layer.vertical(v, memory)
            v = _gate(w)
            said.append(layer.down(w))
        return said

    def beside(
        self, x: Float[Tensor, "rows channels h w"], above: Sequence[Tensor], memory: ConvolutionCache | None = None
    ) -> Float[Tensor, "rows logits h w"]:
        """Return the logits of every pixel."""
        h = x
        for layer, said in zip(self._stack(), above, strict=True):
            new = layer.out(_gate(layer.horizontal(h, memory) + said), memory)
            h = new if layer.is_first else h + new
        logits: Tensor = self.head(h, memory)
        return logits

    def _stack(self) -> "list[_Layer]":
        return cast("list[_Layer]", list(self.layers))


@final
class _Layer(nn.Module):
    def __init__(self, p: int, channels: int, kernel: int, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        side, maps = kernel // 2, channel_of(p, channels)
        both = maps.repeat(2)  # the two halves of a gate belong to the same channels
        reads = torch.arange(channels) if is_first else maps
        self.vertical = MaskedConvolution(
            reads, both, sees="above" if is_first else "row", up=side, left=side, right=side
        )
        self.down = nn.Conv2d(2 * p, 2 * p, 1)  # rows above are earlier in every channel
        self.horizontal = MaskedConvolution(reads, both, sees="before" if is_first else "until", left=side)
        self.out = MaskedConvolution(maps, maps, sees="until")
        with torch.no_grad():
            for gated in (self.vertical, self.horizontal):
                gated.weight *= _GAIN


def _gate(x: Float[Tensor, "rows two_p h w"]) -> Float[Tensor, "rows p h w"]:
    a, b = x.chunk(2, dim=1)
    return a.tanh() * b.sigmoid()
