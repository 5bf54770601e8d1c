"""Images as sequences of pixels, and PixelCNN, the first network for them.

    q(x) = Π_t softmax(f(· ; x_<t))[x_t],      t = (i · width + j) · channels + c      (row, column, channel)

PixelCNN (van den Oord, Kalchbrenner, Kavukcuoglu 2016, Pixel Recurrent Neural Networks, table 1 and figure 5):

    a 7 × 7 convolution with mask A, then blocks  x + 1×1(ReLU(3×3 mask B(ReLU(1×1(ReLU(x))))))  of 2h → h → h → 2h
    maps, then twice ReLU and 1 × 1, then the logits

It does not see everything that came before: a cone to the upper right is its blind spot (van den Oord et al. 2016,
Conditional Image Generation with PixelCNN Decoders, figure 1), which ``gated_pixelcnn`` has not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from freenergy.apps.images.masked_convolution import ConvolutionCache, MaskedConvolution, channel_of
from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import inference

_FIRST = 3  # rows above and columns on each side that the first 7 × 7 convolution sees


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """The size of an image: a pixel has ``channels`` values, each one of ``levels``."""

    height: int
    width: int
    channels: int = 1
    levels: int = 2

    def __post_init__(self) -> None:
        check_range(self, "height", "width", "channels", at_least=1)
        check_range(self, "levels", at_least=2)

    @property
    def row(self) -> int:
        """Tokens in a row of pixels."""
        return self.width * self.channels

    @property
    def tokens(self) -> int:
        """Tokens in an image."""
        return self.height * self.row

    def place(self, t: int) -> tuple[int, int, int]:
        """Row, column and channel of token t."""
        i, rest = divmod(t, self.row)
        return i, *divmod(rest, self.channels)


class PixelModule(nn.Module):
    """A network of masked convolutions in two parts: features of the rows above, and of the pixels to the left.

    The first can be computed for a whole row before any of its pixels is known.
    """

    reach: int  # rows above that a pixel sees
    readers: tuple[MaskedConvolution, ...]  # those that read the image itself

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.shape = shape

    def above(self, x: Float[Tensor, "rows channels h w"], memory: ConvolutionCache | None = None) -> list[Tensor]:
        """Return the features of the rows above for each layer of ``beside``; none where one stack reads both parts."""
        return []

    def beside(
        self, x: Float[Tensor, "rows channels h w"], above: Sequence[Tensor], memory: ConvolutionCache | None = None
    ) -> Float[Tensor, "rows logits h w"]:
        """Return the logits of every pixel, channel by channel."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "rows channels h w"]) -> Float[Tensor, "rows logits h w"]:
        """Return the logits of whole images, or of their first rows."""
        return self.beside(x, self.above(x))


@final
class Head(nn.Module):
    """The head: twice ReLU and 1 × 1, then the logits."""

    def __init__(self, features: int, head: int, shape: ImageShape) -> None:
        super().__init__()
        C = shape.channels
        sizes = (features, head, head, C * shape.levels)
        maps = [channel_of(size, C) for size in sizes]
        self.layers = nn.ModuleList(MaskedConvolution(reads, of, sees="until") for reads, of in pairwise(maps))

    def forward(self, x: Tensor, memory: ConvolutionCache | None) -> Tensor:
        """Return the logits."""
        x = relu(x)
        for layer in self.layers[:-1]:
            x = layer(x, memory).relu_()
        logits: Tensor = self.layers[-1](x, memory)
        return logits


@final
class PixelCNN(PixelModule):
    """The network of the equation above, with ``blocks`` residual blocks of h = ``features``."""

    def __init__(self, shape: ImageShape, *, blocks: int, features: int, head: int) -> None:
        super().__init__(shape)
        wide = channel_of(2 * features, shape.channels)
        pixel = torch.arange(shape.channels)
        self.first = MaskedConvolution(pixel, wide, sees="before", up=_FIRST, left=_FIRST, right=_FIRST)
        self.blocks = nn.ModuleList(_Residual(features, shape.channels) for _ in range(blocks))
        self.head = Head(2 * features, head, shape)
        self.reach = _FIRST + blocks
        self.readers = (self.first,)

    def beside(
        self, x: Float[Tensor, "rows channels h w"], above: Sequence[Tensor], memory: ConvolutionCache | None = None
    ) -> Float[Tensor, "rows logits h w"]:
        """Return the logits of every pixel."""
        h = self.first(x, memory)
        for block in self.blocks:
            h = block(h, memory)
        logits: Tensor = self.head(h, memory)
        return logits


@final
class _Residual(nn.Module):
    def __init__(self, h: int, channels: int) -> None:
        super().__init__()
        wide, narrow = channel_of(2 * h, channels), channel_of(h, channels)
        self.narrowing = MaskedConvolution(wide, narrow, sees="until")
        self.spatial = MaskedConvolution(narrow, narrow, sees="until", up=1, left=1, right=1)
        self.widening = MaskedConvolution(narrow, wide, sees="until")

    def forward(self, x: Tensor, memory: ConvolutionCache | None) -> Tensor:
        # in place if no one else uses the map: these layers are memory-bound
        narrow = self.narrowing(relu(x), memory).relu_()
        wide: Tensor = self.widening(self.spatial(narrow, memory).relu_(), memory)
        return wide.add_(x)


@final
class PixelNetwork:
    """q(x) of images: a Network whose tokens are pixels in raster order, channel last; unconditional."""

    def __init__(self, module: PixelModule) -> None:
        self.module, self.shape = module, module.shape
        self.vocab_size = module.shape.levels

    def logits(self, given: Any, tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Return f at the first T positions; the rows of pixels below are not computed."""
        n, T = tokens.shape
        C, V, W = self.shape.channels, self.shape.levels, self.shape.width
        maps = self.module(self._image(tokens, max(1, -(-T // self.shape.row))))
        by_place = maps.view(n, C, V, -1, W).permute(0, 3, 4, 1, 2)
        logits: Tensor = by_place.reshape(n, -1, V)[:, :T]
        return logits

    def draw(
        self, given: Any, known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draw the next ``length`` pixels, or those that are left; none is masked."""
        K = min(length, self.shape.tokens - known.shape[1])
        with inference(self.module), torch.no_grad():
            drawn = self._grow(known, K, rng) if K else known[:, :0]
        return drawn, torch.ones_like(drawn, dtype=torch.bool)

    def _grow(self, known: Int[Tensor, "rows P"], K: int, rng: Rng) -> Int[Tensor, "rows K"]:
        """Read the rows that the first new pixel sees, then draw pixel by pixel."""
        (n, P), shape, module = known.shape, self.shape, self.module
        now = P // shape.row
        top = max(0, now - module.reach)
        x = self._image(known, shape.place(P + K - 1)[0] + 1)[:, :, top:].clone()
        memory = ConvolutionCache(*x.shape[2:])
        read = x[:, :, : now + 1 - top]
        module.beside(read, module.above(read, memory), memory)
        drawn: list[Tensor] = []
        for t in range(P, P + K):
            i, j, c = shape.place(t)
            i -= top
            if t == P or t % shape.row == 0:
                memory.at = (i, 0)
                above = module.above(x[:, :, i : i + 1], memory)
            memory.at = (i, j)
            pixel = x[:, :, i : i + 1, j : j + 1]
            maps = module.beside(pixel, [said[..., j : j + 1] for said in above], memory)
            drawn.append(rng.categorical(maps.view(n, shape.channels, -1)[:, c]))
            x[:, c, i, j] = drawn[-1].to(x) / (shape.levels - 1)
            for reader in module.readers:
                memory.read(reader, pixel)
        return torch.stack(drawn, dim=1)

    def _image(self, tokens: Int[Tensor, "rows T"], height: int) -> Float[Tensor, "rows channels height width"]:
        """Return the first rows of pixels, from 0 to 1; what is not known yet is 0."""
        shape, weight = self.shape, next(self.module.parameters())
        if tokens.shape[1] > shape.tokens:
            raise UserError(
                f"{tokens.shape[1]} tokens are more than the {shape.tokens} of an image of {shape.height} × "
                f"{shape.width} × {shape.channels}: give images of this size"
            )
        filled = pad(tokens.to(weight), (0, height * shape.row - tokens.shape[1]))
        return (filled / (shape.levels - 1)).view(-1, height, shape.width, shape.channels).permute(0, 3, 1, 2)
