"""Sums over the paths of a graph: in log space in plain torch, and by the compiled kernel where its range suffices.

    a_1(s) = initial(s) + x_1(s),     a_t(s) = x_t(s) + lse_{r → s}( a_{t−1}(r) + w_rs )
    log Σ = lse_s( a_L(s) + final(s) )

x_t(s) is the potential of the symbol of s. In log space any numbers do, on any device, and autograd differentiates as
often as one likes; the gradient of log Σ is the posterior of each symbol. Legend: B sequences, T frames, C symbols, S
states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.structured.graph_kernels import ArcTables, Bands, PathSums, arc_tables, graph_kernels
from freenergy.structured.label_graph import LabelGraph
from freenergy.structured.log_space import lse

INF = float("inf")


@final
@dataclass(frozen=True, slots=True, eq=False)
class GraphTensors:
    """A graph as tensors: for log space on some device, and sorted for the kernel."""

    symbol: Tensor
    source: Tensor
    target: Tensor
    log_weight: Tensor
    initial: Tensor
    final: Tensor
    tables: ArcTables

    @classmethod
    def of(cls, graph: LabelGraph, device: torch.device) -> "GraphTensors":
        """Copy the arrays of a graph, once per graph and device."""
        kept = _KEPT.setdefault(graph, {})
        if device not in kept:
            kept[device] = cls._copied(graph, device)
        return kept[device]

    @classmethod
    def _copied(cls, graph: LabelGraph, device: torch.device) -> "GraphTensors":
        names = ("symbol", "source", "target", "log_weight", "initial", "final")
        arrays = {name: torch.from_numpy(getattr(graph, name)).to(device) for name in names}
        return cls(**arrays, tables=arc_tables(graph))


_KEPT: WeakKeyDictionary[LabelGraph, dict[torch.device, GraphTensors]] = WeakKeyDictionary()


def bands(graph: LabelGraph, labels: Sequence[Sequence[int]], device: torch.device | None = None) -> Bands:
    """Return the chains of symbols that spell some label sequences, padded to the longest."""
    chains = [graph.band(each) for each in labels]
    width = max((len(symbols) for symbols, _, _ in chains), default=0) + 2
    symbol = torch.tensor([s + [0] * (width - len(s)) for s, _, _ in chains], dtype=torch.int32).view(
        len(chains), width
    )
    skip = torch.tensor([k + [False] * (width - len(k)) for _, k, _ in chains], dtype=torch.float64).view(
        len(chains), width
    )
    sizes = [torch.tensor(numbers) for numbers in ([len(s) for s, _, _ in chains], [n for _, _, n in chains])]
    return Bands(*(each.to(device or torch.device("cpu")) for each in (symbol, skip, *sizes)))


def graph_alphas(x: Tensor, lengths: Tensor, g: GraphTensors) -> Float[Tensor, "T B S"]:
    """Return a_t; beyond its end a row keeps its last one."""
    own = x.double().transpose(0, 1)[:, :, g.symbol]
    steps = [own[0] + g.initial]
    for t in range(1, len(own)):
        a = own[t] + _lse_into(steps[-1][:, g.source] + g.log_weight, g.target, len(g.symbol))
        steps.append(torch.where((t < lengths).unsqueeze(1), a, steps[-1]))
    return torch.stack(steps)


def _lse_into(values: Float[Tensor, "B A"], target: Int[Tensor, " A"], size: int) -> Float[Tensor, "B S"]:
    """Return the log-sum-exp of the values that arrive at each target; −inf, with gradient 0, where none does."""
    index = target.expand(len(values), -1)
    top = torch.full((len(values), size), -INF, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(1, index, values.detach(), "amax")
    top = torch.where(top > -INF, top, 0.0)
    total = torch.zeros_like(top).index_add(1, target, (values - top[:, target]).exp())
    is_zero = total == 0
    return torch.where(is_zero, -INF, torch.where(is_zero, 1.0, total).log() + top)


def graph_log_sum(x: Tensor, lengths: Tensor, g: GraphTensors) -> Float[Tensor, " B"]:
    """Return log Σ over all paths, in log space."""
    return lse(graph_alphas(x, lengths, g)[-1] + g.final, 1)


def band_log_sum(x: Tensor, lengths: Tensor, b: Bands) -> Float[Tensor, " B"]:
    """Return log Σ over the paths that spell each row's labels, in log space."""
    B, T, _ = x.shape
    S = b.symbol.shape[1]
    place = torch.arange(S, device=x.device)
    own = x.double().transpose(0, 1).gather(2, b.symbol.long().expand(T, B, S))
    a = torch.where(place < b.begins.unsqueeze(1), own[0], -INF)
    over = torch.where(b.skip > 0, 0.0, -INF)
    for t in range(1, T):
        one, two = (torch.cat([a.new_full((B, n), -INF), a[:, :-n]], 1) for n in (1, 2))
        now = own[t] + lse(torch.stack([a, one, two + over]), 0)
        a = torch.where((t < lengths).unsqueeze(1), now, a)
    ends = (place < b.states.unsqueeze(1)) & (place >= (b.states - b.begins).unsqueeze(1))
    return lse(torch.where(ends, a, -INF), 1)


def plain_graph_sums(x: Tensor, lengths: Tensor, graph: LabelGraph) -> PathSums:
    """Return the sums over a graph with posteriors, in log space."""
    g = GraphTensors.of(graph, x.device)
    return _with_posterior(lambda own: graph_log_sum(own, lengths, g), x)


def plain_band_sums(x: Tensor, lengths: Tensor, b: Bands) -> PathSums:
    """Return the sums over the paths of label sequences with posteriors, in log space."""
    return _with_posterior(lambda own: band_log_sum(own, lengths, b), x)


def _with_posterior(log_sum: Callable[[Tensor], Tensor], x: Tensor) -> PathSums:
    with torch.enable_grad():
        own = x.detach().double().requires_grad_()
        value = log_sum(own)
        posterior = torch.autograd.grad(value.sum(), own, materialize_grads=True)[0]
    return PathSums(value.detach(), posterior, torch.zeros(len(x), dtype=torch.bool))


def summed_graph(x: Tensor, lengths: Tensor, g: GraphTensors, compiled: bool) -> Float[Tensor, " B"]:
    """Return log Σ over the graph, differentiable in x; every length is at least 1."""
    kernel = _kernel(x, compiled)
    fast = None if kernel is None else lambda own: kernel.graph_sums(own, lengths, g.tables)
    return _summed(x, fast, lambda own, rows: graph_log_sum(own, lengths[rows], g))


def summed_bands(x: Tensor, lengths: Tensor, b: Bands, compiled: bool) -> Float[Tensor, " B"]:
    """Return log Σ over the paths of each label sequence, differentiable in x; every length is at least 1."""
    kernel = _kernel(x, compiled)
    fast = None if kernel is None else lambda own: kernel.band_sums(own, lengths, b)
    return _summed(x, fast, lambda own, rows: band_log_sum(own, lengths[rows], Bands(*(each[rows] for each in b))))


def _kernel(x: Tensor, compiled: bool) -> Any:
    return graph_kernels() if compiled and x.device.type == "cpu" else None


def _summed(
    x: Tensor, fast: Callable[[Tensor], PathSums] | None, exact: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, " B"]:
    if fast is None:
        return exact(x, torch.arange(len(x), device=x.device)).to(x.dtype)
    found: Tensor = _PathSum.apply(x, fast, exact)  # type: ignore[no-untyped-call]
    return found


class _PathSum(torch.autograd.Function):
    """log Σ by the kernel, doubtful rows in log space; a gradient of a gradient goes through log space."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fast: Callable[..., PathSums], exact: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        sums = fast(x)
        log_sum, posterior = sums.log_sum, sums.posterior
        if bool(sums.is_doubtful.any()):
            rows = sums.is_doubtful.nonzero().flatten()
            again = _with_posterior(lambda own: exact(own, rows), x[rows])
            log_sum, posterior = (a.index_copy(0, rows, b) for a, b in zip(sums[:2], again[:2], strict=True))
        ctx.exact = exact
        ctx.save_for_backward(x, posterior)
        return log_sum.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, posterior = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller will differentiate again
            value = ctx.exact(x, torch.arange(len(x)))
            given = grad.to(value.dtype)
            return torch.autograd.grad(value, x, given, create_graph=True, materialize_grads=True)[0], None, None
        return (posterior * grad.double().view(-1, 1, 1)).to(x.dtype), None, None
