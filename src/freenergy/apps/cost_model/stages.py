"""What each stage costs: tokens, floating-point operations, bytes; and how long that takes on given devices.

    drawing  K continuations of L tokens after each of M prefixes of p tokens:
             M·read(p, p) + M·K·read(L − 1, p + L/2) + M·(1 + K·(L − 1))·predict
    reading  S strings of p + L tokens in both directions:   S·read(p + L, p + L)
             a prefix once for N strings:                    S/N·read(p, p) + S·read(L, p + L)
    training a step of B rows of T tokens:                   3·B·(read(T, T) + predict(T))
    hours    max(FLOPs / (devices · peak · utilisation), sent / bandwidth) / 3600

``read(tokens, seen)`` and ``predict(tokens)`` are those of the network (``base.shapes``). A training step is three
readings: one forward, two for the gradients of activations and weights. The last token of a draw is not read again.
Bytes are what a stage leaves on disk: a stored draw has L tokens of about log₂ V + 1.5 bits after compression, and
about 12 bytes of log-probabilities; a file of draws has a fixed part too. Operations and sending overlap at best, so
the slower of the two is reported. Utilisation is an assumption, unless it was measured on one device of the kind.
"""

import math
from dataclasses import asdict, dataclass
from typing import final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.lm.presets import Shape

_BITS_OVER = 1.5  # a token's, over log₂ V
_NUMBERS = 12.5  # bytes a draw, of its two log-probabilities
_FILE = 4_000  # bytes of a file of draws that holds nothing yet
_FLOAT = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens that networks read or draw, operations, bytes left on disk, bytes that each rank sends in training."""

    tokens: float | int = 0
    flops: float | int = 0
    bytes: float | int = 0
    sent: float | int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """``count`` devices that are alike."""

    count: int = 1
    peak: float = 1.8e11  # FLOP/s of one device
    utilisation: float = 0.5  # share of the peak that is reached
    bandwidth: float = 1e10  # bytes per second that a device sends to another

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"devices is {self.count}: set it to 1 or more")
        check_range(self, "peak", "bandwidth", above=0)
        check_range(self, "utilisation", above=0, at_most=1)

    def hours(self, cost: Cost) -> float:
        """Return how long a stage takes."""
        working = cost.flops / (self.count * self.peak * self.utilisation)
        return max(working, cost.sent / self.bandwidth) / 3600


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """Prefixes of p tokens and continuations of L."""

    prefix: int
    continuation: int

    @property
    def length(self) -> int:
        """Return p + L."""
        return self.prefix + self.continuation


def drawing(shape: Shape | None, windows: WindowCounts, prefixes: float | int, per_prefix: float | int) -> Cost:
    """Cost shared-prefix decoding; a base that is not a local network costs its tokens alone."""
    p, L = windows.prefix, windows.continuation
    draws = prefixes * per_prefix
    tokens = prefixes * p + draws * L
    if shape is None:
        return Cost(tokens=tokens)
    read = shape.reading(prefixes * p, p) + shape.reading(draws * (L - 1), p + L / 2)
    return Cost(tokens=tokens, flops=read + shape.predicting(prefixes + draws * (L - 1)))


def storing(windows: WindowCounts, prefixes: float | int, per_prefix: float | int, vocab_size: int, shard: int) -> Cost:
    """Cost the draws on disk."""
    bits = math.log2(max(vocab_size, 2)) + _BITS_OVER
    each = windows.continuation * bits / 8 + _NUMBERS
    return Cost(bytes=prefixes * per_prefix * each + math.ceil(prefixes / shard) * _FILE)


def reading(shape: Shape, windows: WindowCounts, strings: float | int, *, once_for: float | int = 1) -> Cost:
    """Cost reading strings, whose prefix is read once for ``once_for`` of them."""
    p, L, T = windows.prefix, windows.continuation, windows.length
    if once_for == 1:
        return Cost(tokens=strings * T, flops=shape.reading(strings * T, T))
    prefixes = strings / once_for
    flops = shape.reading(prefixes * p, p) + shape.reading(strings * L, T)
    return Cost(tokens=prefixes * p + strings * L, flops=flops)


def scoring(shape: Shape | None, windows: WindowCounts, strings: float | int, *, once_for: float | int = 1) -> Cost:
    """Cost log P_LM of given continuations; the prefix of several strings is read once."""
    p, L = windows.prefix, windows.continuation
    prefixes = strings / once_for
    tokens = prefixes * p + strings * L
    if shape is None:
        return Cost(tokens=tokens)
    flops = shape.reading(prefixes * p, p) + shape.reading(strings * L, p + L / 2) + shape.predicting(strings * L)
    return Cost(tokens=tokens, flops=flops)


def training(
    shape: Shape, steps: float | int, rows: float | int, length: float | int, *, predicts: bool, ranks: int = 1
) -> Cost:
    """Cost steps of AdamW; each rank sends its gradients in 32 bits around a ring."""
    tokens = steps * rows * length
    forward = shape.reading(tokens, length) + (shape.predicting(tokens) if predicts else 0.0)
    sent = steps * 2 * (ranks - 1) / ranks * shape.parameters * _FLOAT
    return Cost(tokens=tokens, flops=3 * forward, sent=sent)


def validating(shape: Shape, times: float | int, tokens: float | int, length: float | int) -> Cost:
    """Cost the cross-entropy on held-out tokens, ``times`` over."""
    return Cost(tokens=times * tokens, flops=times * (shape.reading(tokens, length) + shape.predicting(tokens)))


def keeping(shape: Shape, copies: int = 1) -> Cost:
    """Cost the weights on disk; the optimiser's moments are deleted when training has ended."""
    return Cost(bytes=copies * shape.parameters * _FLOAT)
