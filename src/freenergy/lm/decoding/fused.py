"""The parts of a decoding step, compiled.

    y[o, n] = Σ_i W[o, i] · x[i, n],      candidates n side by side in blocks of 64 (``products.h``, ``fused.cpp``)

Activations are [B, C, features, 64]: every operation is one on whole vectors of candidates. The weights are the
model's own. The source is compiled once, at first use, by the machine's own C++ compiler and for its own processor, and
kept in the cache under a name made of source, compiler, flags and processor. It is plain C on pointers, so no version
of torch matters. Where there is no compiler, or it fails, ``kernels`` is None and plain torch does the same.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, pad

from freenergy.core.compiled import compiled_library
from freenergy.core.rng import BLOCK
from freenergy.corpus.resources.fetch import cache_folder
from freenergy.lm.decoding.drawing import DrawnTokens
from freenergy.lm.decoding.families import Activation, Affine, DecoderWeights, Norm
from freenergy.lm.decoding.memory import Memory

_SOURCE, _PRODUCTS = (Path(__file__).with_name(name) for name in ("fused.cpp", "products.h"))
LANES = 64  # candidates in a block
FEWEST = 32  # candidates of a context from which on this pays off: half a block is idle then
_LOGITS = 2**24  # numbers of logits held at once: 64 MB
Functions = dict[str, Callable[..., None]]


def kernels() -> "Fused | None":
    """Return the compiled parts with room of their own, or None where they cannot be had."""
    functions = _functions()
    return None if functions is None else Fused(functions)


@cache
def _functions() -> Functions | None:
    library = _library()
    if library is None:
        return None
    functions = {name: getattr(library, name) for name in _SIGNATURES}
    for name, types in _SIGNATURES.items():
        functions[name].argtypes, functions[name].restype = [*types, ctypes.c_int], None
    return functions


def _library() -> ctypes.CDLL | None:
    return compiled_library(cache_folder() / "compiled", "fused", [_SOURCE, _PRODUCTS], functions=_SIGNATURES)


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "fused_norm": [_POINTER] * 4 + [_INT] * 2 + [_FLOAT],
    "fused_affine": [_POINTER, _INT, _INT] + [_POINTER] * 3 + [_INT] * 4,
    "fused_attend": [_POINTER, _INT] + [_POINTER] * 3 + [_INT, _FLOAT] + [_POINTER] * 6 + [_INT] * 8,
    "fused_draw": [_POINTER, _INT, _INT] + [_POINTER] * 3 + [_INT] * 3 + [_POINTER] * 6,
}  # and the number of threads
_PLAIN, _ADD, _GELU, _SWIGLU = range(4)  # what follows a product


@final
class Fused:
    """As ``plain.PlainSteps``, on activations [B, C, features, 64]."""

    lanes: int | None = LANES

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._rooms: dict[str, Tensor] = {}

    def enter(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B C E lanes"]:
        """Lay candidates out side by side; lanes without a candidate are idle."""
        B, N, E = x.shape
        out = self._room("x", (B, -(-N // LANES), E, LANES))
        for c, some in enumerate(x.split(LANES, dim=1)):
            out[:, c, :, : some.shape[1]] = some.transpose(1, 2)
            out[:, c, :, some.shape[1] :] = 0
        return out

    def rows(self, x: Float[Tensor, "B C E lanes"], shape: tuple[int, int]) -> Float[Tensor, "R E"]:
        """Return the way back."""
        return x.transpose(2, 3).flatten(1, 2)[:, : shape[1]].flatten(0, 1)

    def norm(self, x: Float[Tensor, "B C E lanes"], how: Norm) -> Float[Tensor, "B C E lanes"]:
        """Apply LayerNorm or RMSNorm."""
        out = self._room("norm", x.shape)
        self._call("fused_norm", x, how.weight, how.bias, out, x.shape[0] * x.shape[1], x.shape[2], how.eps)
        return out

    def qkv(self, x: Float[Tensor, "B C E lanes"], product: Affine) -> Float[Tensor, "B C outputs lanes"]:
        """Compute queries, keys and values."""
        return self._affine(x, product, "qkv", product.weight.shape[1], _PLAIN)

    def up(self, x: Float[Tensor, "B C E lanes"], product: Affine, how: Activation) -> Float[Tensor, "B C inner lanes"]:
        """Return the inner features of the feed-forward part."""
        outputs = product.weight.shape[1]
        if how == "swiglu":
            return self._affine(x, product, "up", outputs // 2, _SWIGLU)
        out = self._affine(x, product, "up", outputs, _GELU if how == "gelu_tanh" else _PLAIN)
        return out if how == "gelu_tanh" else gelu(out)

    def add(self, x: Float[Tensor, "B C E lanes"], product: Affine, h: Float[Tensor, "B C inner lanes"]) -> None:
        """Compute x += W · h + b, in place."""
        self._product(h, product, x, _ADD)

    def attend(
        self, network: DecoderWeights, memory: Memory, layer: int, qkv: Float[Tensor, "B C outputs lanes"]
    ) -> Float[Tensor, "B C HD lanes"]:
        """Attend from each candidate's new token to its context, past and itself; add it to the memory."""
        keys, values, t = memory.keys[layer], memory.values[layer], memory.filled
        B, C, K, L, D, _ = keys.shape
        prefix_keys, prefix_values = memory.prefix_keys[layer], memory.prefix_values[layer]
        cos, sin = (None, None) if memory.angles is None else (angle[t] for angle in memory.angles)
        half = 0 if cos is None else cos.shape[-1]
        out = self._room("seen", (B, C, network.heads * D, LANES))
        self._call(
            "fused_attend", qkv, qkv.shape[2], _places(network.by_head, network.heads, K, D), cos, sin, half,
            network.scaling, prefix_keys, prefix_values, memory.lengths, keys, values, out,
            B, C, K, network.heads // K, D, prefix_keys.shape[1], t + 1, L,
        )  # fmt: skip
        return out

    def draw(
        self, hidden: Float[Tensor, "B C E lanes"], head: Affine, u: Float[Tensor, "B N"], is_traced: bool
    ) -> DrawnTokens:
        """Draw a token for each candidate at u; logits exist for some blocks of candidates at a time."""
        (B, C, E, _), V, N = hidden.shape, head.weight.shape[1], u.shape[1]
        all_u = pad(u, (0, C * LANES - N)).view(B * C, LANES)
        tokens = torch.empty(B * C, LANES, dtype=torch.long)
        log_p, entropy, log_rank = torch.empty(3, B * C, LANES, dtype=torch.float64)
        size = min(B * C, max(1, _LOGITS // (V * LANES)))
        logits = self._room("logits", (size, V, LANES))
        numbers = self._room("numbers", (3, size, -(-V // BLOCK), LANES))
        for first in range(0, B * C, size):
            some = slice(first, first + size)
            x, at = hidden.flatten(0, 1)[some], all_u[some]
            seen = (entropy[some], log_rank[some]) if is_traced else (None, None)
            self._call(
                "fused_draw", *_matrix(head), x, at, len(x), E, V, logits, numbers, tokens[some], log_p[some], *seen,
            )  # fmt: skip
        found = [part.view(B, C * LANES)[:, :N].flatten() for part in (tokens, log_p, entropy, log_rank)]
        drawn = DrawnTokens(found[0], found[1], found[1])
        return drawn if not is_traced else drawn._replace(entropy=found[2], log_rank=found[3])

    def _affine(self, x: Tensor, product: Affine, name: str, outputs: int, how: int) -> Tensor:
        out = self._room(name, (*x.shape[:2], outputs, LANES))
        self._product(x, product, out, how)
        return out

    def _product(self, x: Tensor, product: Affine, out: Tensor, how: int) -> None:
        blocks = x.shape[0] * x.shape[1]
        self._call("fused_affine", *_matrix(product), x, out, blocks, x.shape[2], out.shape[2], how)

    def _room(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the same memory at every step: fresh memory would have to be cleared first, page by page."""
        if name not in self._rooms or self._rooms[name].shape != shape:
            self._rooms[name] = torch.empty(shape)
        return self._rooms[name]

    def _call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Pass tensors by address: contiguous but for weights, float32 unless ``fused.cpp`` says otherwise."""
        # not isinstance, which torch answers in Python
        values = [a.data_ptr() if type(a) is Tensor else a for a in arguments]
        self._functions[name](*values, torch.get_num_threads())


def _matrix(product: Affine) -> tuple[Tensor, int, int, Tensor | None]:
    """Return the weights, how far apart outputs and inputs are, and the bias."""
    return product.weight, product.weight.stride(1), product.weight.stride(0), product.bias


@cache
def _places(by_head: bool, H: int, K: int, D: int) -> Tensor:
    """Return the offsets of the first q, k and v of a row, and the strides."""
    if by_head:
        return torch.tensor([0, 3 * D, D, 3 * D, 2 * D, 3 * D])
    return torch.tensor([0, D, H * D, D, (H + K) * D, D])
