"""Convolutions that see only what comes earlier in raster order, and the cache for drawing an image pixel by pixel.

    y(i, j) = b + Σ_{a = −up … 0} Σ_{c = −left … right} (M ∘ W)(a, c) · x(i + a, j + c)

Rows above (a < 0) are seen whole, rows below never: a kernel ends with its own row. In that row M depends on ``sees``:

    "above"   nothing
    "before"  the columns to the left, and at j itself the channels before an output's own      (mask A)
    "until"   the columns to the left, and at j itself the channels up to an output's own       (mask B)
    "row"     everything: for maps that depend on the rows above only

Masks A and B are those of van den Oord, Kalchbrenner and Kavukcuoglu (2016), Pixel Recurrent Neural Networks, section
3.4. Feature maps are divided among the channels of a pixel, so that green sees red, and blue sees both.

What a convolution has made of a pixel never changes when later pixels come. So an image is drawn with a
``ConvolutionCache``: every convolution keeps what it has read, and a new pixel costs one pixel's work instead of an
image's.
"""

from typing import Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, pad

_TOGETHER = torch.channels_last  # the maps of a pixel are contiguous, since one pixel at a time is read and written
Sees = Literal["above", "before", "until", "row"]


def channel_of(maps: int, channels: int) -> Int[Tensor, " maps"]:
    """Return the channel of a pixel that each feature map belongs to, in order and in parts of nearly equal size.

    >>> channel_of(7, 3).tolist()
    [0, 0, 0, 1, 1, 2, 2]
    """
    return torch.arange(maps) * channels // maps


@final
class ConvolutionCache:
    """The inputs that each convolution has read while images are drawn; ``at`` is the position of the next input."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.at = (0, 0)
        self._seen: dict[nn.Module, Tensor] = {}
        self._weights: dict[nn.Module, Tensor] = {}

    def read(self, reader: "MaskedConvolution", x: Float[Tensor, "rows maps h w"]) -> Tensor:
        """Store x at its position; returns x with its neighbourhood, zero beyond the borders."""
        up, left, right = reader.up, reader.left, reader.right
        if reader not in self._seen:
            shape = (*x.shape[:2], up + self.height, left + self.width + right)
            self._seen[reader] = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_TOGETHER).zero_()
        (i, j), (h, w), seen = self.at, x.shape[2:], self._seen[reader]
        seen[:, :, up + i : up + i + h, left + j : left + j + w] = x
        return seen[:, :, i : i + up + h, j : j + left + w + right]

    def weight(self, reader: "MaskedConvolution") -> Tensor:
        """Return the masked weight, computed once."""
        if reader not in self._weights:
            self._weights[reader] = reader.masked_weight().contiguous(memory_format=_TOGETHER)
        return self._weights[reader]


@final
class MaskedConvolution(nn.Module):
    """One convolution; ``reads`` and ``of`` say which channel each of its input and output maps belongs to."""

    mask: Tensor

    def __init__(
        self,
        reads: Int[Tensor, " inputs"],
        of: Int[Tensor, " outputs"],
        *,
        sees: Sees,
        up: int = 0,
        left: int = 0,
        right: int = 0,
    ) -> None:
        super().__init__()
        self.up, self.left, self.right = up, left, right
        like = nn.Conv2d(len(reads), len(of), (up + 1, left + 1 + right))  # torch's own initial weights
        self.weight, self.bias = like.weight, like.bias
        self.register_buffer("mask", _mask(like.weight, reads, of, sees, left), persistent=False)

    def forward(
        self, x: Float[Tensor, "rows inputs h w"], memory: ConvolutionCache | None = None
    ) -> Float[Tensor, "rows outputs h w"]:
        """Return y at the positions of x: whole images, or the next pixels with a cache."""
        weight = self.masked_weight() if memory is None else memory.weight(self)
        if self.up or self.left or self.right:
            x = pad(x, (self.left, self.right, self.up, 0)) if memory is None else memory.read(self, x)
        if x.shape[2:] == weight.shape[2:]:  # one pixel: a matrix product has less overhead than a convolution
            one, by = (part.permute(0, 2, 3, 1).flatten(1) for part in (x, weight))
            return linear(one, by, self.bias)[:, :, None, None]
        return conv2d(x, weight, self.bias)

    def masked_weight(self) -> Tensor:
        """Return M ∘ W."""
        return self.weight * self.mask


def _mask(
    weight: Float[Tensor, "outputs inputs tall wide"],
    reads: Int[Tensor, " inputs"],
    of: Int[Tensor, " outputs"],
    sees: Sees,
    centre: int,
) -> Float[Tensor, "outputs inputs tall wide"]:
    mask = torch.ones_like(weight)
    own_row = mask[:, :, -1]
    match sees:
        case "above":
            own_row.zero_()
        case "before" | "until":
            own_row[:, :, centre + 1 :] = 0
            earlier = of[:, None] > reads if sees == "before" else of[:, None] >= reads
            own_row[:, :, centre] = earlier.to(mask.dtype)
        case "row":
            pass
    return mask
