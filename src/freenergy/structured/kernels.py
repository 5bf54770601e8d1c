"""The compiled recursions of linear chains (``kernels.cpp``), on the CPU in float32 and float64.

    forward    x, A  →  log Z, and e, s of every position         backward    e, s, ∂/∂log Z  →  ∂x, ∂A, ∂start, ∂end

The source is compiled at first use (``core/compiled.py``) and compared with plain torch before it is used. Where there
is no compiler, or the numbers differ, ``kernels`` is None and plain torch does the same.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from freenergy.core.compiled import FLAGS, compiled_library
from freenergy.corpus.resources import cache_folder
from freenergy.structured.plain import FINE, ChainGradients, ChainSums, PlainChains

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (*FLAGS, "-ffp-contract=fast")  # products and sums in one instruction, as -std=gnu++17 would
_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
_WIDTH = {torch.float32: 16, torch.float64: 8}  # numbers in a vector of 64 bytes
_ENOUGH = 2**22  # products in a call from which on more than one thread pays off


@final
class CompiledChains:
    """As ``plain.PlainChains``: sums, their gradients, and best paths."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, made in (("forward", 4), ("backward", 7), ("best", 3)):
            for dtype, suffix in _SUFFIX.items():
                function = getattr(library, f"chain_{name}_{suffix}")
                function.argtypes, function.restype = [ctypes.c_void_p] * (6 + made), None
                self._functions[name, dtype] = function

    def forward(self, x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, lengths: Tensor) -> ChainSums:
        """Return log Z with what the backward pass needs."""
        B, T, K = x.shape
        width = _WIDTH[x.dtype]
        shape = (B, T, -(-K // width) * width)
        E, S = torch.empty(shape, dtype=x.dtype), torch.empty(shape, dtype=x.dtype)
        log_z, status = torch.empty(B, dtype=torch.float64), torch.empty(B, dtype=torch.int32)
        self._call("forward", x, A, start, end, lengths, E, S, log_z, status)
        return ChainSums(log_z, status, (E, S))

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
        K = x.shape[2]
        grad = torch.where(sums.status == FINE, grad, 0.0).to(x.dtype).contiguous()
        dx, dA, d_start, d_end = (x.new_empty(shape) for shape in (x.shape, A.shape, (K,), (K,)))
        self._call("backward", x, A, start, end, lengths, *sums.kept, grad, dx, dA, d_start, d_end)
        return ChainGradients(dx, dA, d_start, d_end)

    def best(
        self, x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best labels [B, T], −1 where there are none, their scores [B] and the status of each row."""
        labels = torch.empty(x.shape[:2], dtype=torch.long)
        score, status = torch.empty(len(x), dtype=torch.float64), torch.empty(len(x), dtype=torch.int32)
        self._call("best", x, A, start, end, lengths, labels, score, status)
        return labels, score, status

    def _call(
        self, name: str, x: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, lengths: Tensor, *made: Tensor
    ) -> None:
        B, T, K = x.shape
        threads = torch.get_num_threads() if B * T * K * K >= _ENOUGH else 1
        sizes = (ctypes.c_int64 * 4)(B, T, K, threads)
        given = [t if t is None else t.contiguous() for t in (x, A, start, end, lengths)]  # alive until the call ends
        assert all(t is None or t.dtype == x.dtype for t in given[:4])
        pointers = [None if t is None else t.data_ptr() for t in given]
        self._functions[name, x.dtype](*pointers, ctypes.addressof(sizes), *(t.data_ptr() for t in made))


@cache
def kernels() -> CompiledChains | None:
    """Return the compiled recursions, or None where they cannot be had or do not give the right numbers."""
    library = compiled_library(cache_folder() / "compiled", "chain", [_SOURCE], _FLAGS)
    if library is None:
        return None
    compiled = CompiledChains(library)
    return compiled if all(_agrees(compiled, dtype) for dtype in _SUFFIX) else None


def _agrees(compiled: CompiledChains, dtype: torch.dtype) -> bool:
    """Compare with plain torch on a small batch: nine rows of several lengths, forbidden pairs, and 19 labels."""
    steps = torch.arange(9 * 6 * 19, dtype=dtype).view(9, 6, 19)
    x, A = (steps * 0.7).sin(), (steps.flatten()[:361].view(19, 19) * 1.3).cos()
    A = A.masked_fill(torch.eye(19, dtype=torch.bool).roll(1, 0), -torch.inf)
    given = x, A, A[1], A[:, 3].nan_to_num(neginf=0), torch.tensor([6, 6, 5, 4, 3, 2, 1, 0, 6])
    numbers = []
    for way in (compiled, PlainChains()):
        sums = way.forward(*given)
        grads = way.backward(*given, sums, torch.ones(9, dtype=dtype))
        numbers.append(torch.cat([sums.log_z.to(dtype), *(g.flatten() for g in grads)]))
    return torch.allclose(numbers[0], numbers[1], atol=1e-4 if dtype == torch.float32 else 1e-10, rtol=0)
