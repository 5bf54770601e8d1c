"""The compiled sums over the paths of a graph (``graph_kernels.cpp``), on the CPU in float64.

    graph_sums    E, a graph                  →  log Σ_π exp score(π), the posterior of each symbol, the margin of range
    band_sums     E, one label sequence each  →  the same over the paths that spell it

The source is compiled at first use and compared with the sums in log space before it is used.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from freenergy.core.compiled import FLAGS, compiled_library
from freenergy.corpus.resources import cache_folder
from freenergy.structured.label_automaton import LabelAutomaton
from freenergy.structured.label_graph import LabelGraph

_SOURCE = Path(__file__).with_name("graph_kernels.cpp")
_FLAGS = (*FLAGS, "-ffp-contract=fast")
_ENOUGH = 2**22  # products in a call from which on more than one thread pays off
LEAST_MARGIN = 1e-250  # below it too much may have underflowed


class PathSums(NamedTuple):
    """log Σ exp score [B], posteriors of symbols [B, T, C], and which rows have to be done again in log space."""

    log_sum: Tensor
    posterior: Tensor
    is_doubtful: Tensor


class Bands(NamedTuple):
    """Chains of symbols of B label sequences: symbol and skip [B, S + 2], number of states, how many begin a path."""

    symbol: Tensor
    skip: Tensor
    states: Tensor
    begins: Tensor


class ArcTables(NamedTuple):
    """The arrays that the kernel reads: arcs by target and by source, of states and junctions."""

    symbol: Tensor
    join: Tensor
    in_first: Tensor
    in_source: Tensor
    in_weight: Tensor
    out_first: Tensor
    out_target: Tensor
    out_weight: Tensor
    initial: Tensor
    final: Tensor


def arc_tables(graph: LabelGraph) -> ArcTables:
    """Sort the arcs, and let each pair of arcs from both states of a junction be one arc from the junction."""
    S, join = graph.num_states, graph.join
    source, target, label, weight = graph.source, graph.target, graph.label, graph.log_weight
    key = np.where((label > 0) & (join[source] >= 0), join[source], -1)
    order = np.lexsort((source, label, target, key))
    source, target, label, weight, key = (column[order] for column in (source, target, label, weight, key))
    same = (key[1:] >= 0) & (key[1:] == key[:-1]) & (target[1:] == target[:-1]) & (label[1:] == label[:-1])
    first = np.append(same, False)  # of a pair
    source = np.where(first, S + key, source)
    kept = ~np.insert(same, 0, False)
    source, target, weight = source[kept], target[kept], np.exp(weight[kept])
    by_target, by_source = np.lexsort((source, target)), np.lexsort((target, source))
    num_junctions = int(join.max()) + 1
    firsts = [
        np.searchsorted(np.sort(ends), np.arange(num + 1)) for ends, num in ((target, S), (source, S + num_junctions))
    ]
    return ArcTables(
        _int32(graph.symbol), _int32(join), _int32(firsts[0]), _int32(source[by_target]), _float64(weight[by_target]),
        _int32(firsts[1]), _int32(target[by_source]), _float64(weight[by_source]),
        _float64(np.exp(graph.initial)), _float64(np.exp(graph.final)),
    )  # fmt: skip


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


def _float64(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))


@final
class CompiledGraphs:
    """The two sums, on potentials x [B, T, C] of any float type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._graph, self._band = library.graph_sums, library.band_sums
        for function, num in ((self._graph, 16), (self._band, 10)):
            function.argtypes, function.restype = [ctypes.c_void_p] * num, None

    def graph_sums(self, x: Tensor, lengths: Tensor, tables: ArcTables) -> PathSums:
        """Sum over all paths of the graph; every length is at least 1."""
        S, J = len(tables.symbol), int(tables.join.max()) + 1
        return self._sums(self._graph, x, lengths, (S, J), tables, len(tables.in_source))

    def band_sums(self, x: Tensor, lengths: Tensor, bands: Bands) -> PathSums:
        """Sum over the paths that spell given labels; every length is at least 1, every sequence can be spelt."""
        S = bands.symbol.shape[1] - 2
        return self._sums(self._band, x, lengths, (S,), bands, 4 * S)

    def _sums(
        self, function: "ctypes._FuncPointer", x: Tensor, lengths: Tensor, own: tuple[int, ...],
        tables: tuple[Tensor, ...], products: int,
    ) -> PathSums:  # fmt: skip
        B, T, C = x.shape
        top = x.amax(-1, keepdim=True)
        top = torch.where(top > -torch.inf, top, 0.0)
        E = (x - top).double().exp_().contiguous()
        total, margin = torch.full((B,), -torch.inf, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
        posterior = torch.zeros(B, T, C, dtype=torch.float64)
        threads = torch.get_num_threads() if B * T * products >= _ENOUGH else 1
        sizes = (ctypes.c_int64 * (4 + len(own)))(B, T, C, *own, threads)
        lengths = lengths.contiguous()
        given = (E, lengths, None, *tables, total, margin, posterior)
        function(*(ctypes.addressof(sizes) if each is None else each.data_ptr() for each in given))
        inside = torch.arange(T) < lengths.unsqueeze(1)
        log_sum = total + torch.where(inside, top.squeeze(-1).double(), 0.0).sum(1)
        return PathSums(log_sum, posterior, ~(margin > LEAST_MARGIN))


@cache
def graph_kernels() -> CompiledGraphs | None:
    """Return the compiled sums, or None where they cannot be had or do not give the right numbers."""
    library = compiled_library(cache_folder() / "compiled", "graph", [_SOURCE], _FLAGS)
    if library is None:
        return None
    compiled = CompiledGraphs(library)
    return compiled if _agrees(compiled) else None


def _agrees(compiled: CompiledGraphs) -> bool:
    """Compare with the sums in log space on nine rows of several lengths, on a graph and on label sequences."""
    from freenergy.structured import graph_sums

    x = (torch.arange(9 * 6 * 4, dtype=torch.float64).view(9, 6, 4) * 0.7).sin()
    lengths = torch.tensor([6, 6, 5, 4, 3, 2, 1, 6, 6])
    weight = np.cos(np.arange(12.0).reshape(4, 3))
    automaton = LabelAutomaton(np.tile(np.arange(1, 4), (4, 1)), weight, weight[:, 0] / 2)
    graph = LabelGraph.ctc(automaton)
    bands = graph_sums.bands(graph, [[1, 1, 2], [3], [], [2, 1], [1], [2], [3], [1, 2, 3, 1], [1, 2, 1, 2, 1, 2]])
    pairs = (
        (compiled.graph_sums(x, lengths, arc_tables(graph)), graph_sums.plain_graph_sums(x, lengths, graph)),
        (compiled.band_sums(x, lengths, bands), graph_sums.plain_band_sums(x, lengths, bands)),
    )
    return all(
        torch.allclose(a.log_sum, b.log_sum, rtol=1e-12, atol=1e-12)
        and torch.allclose(a.posterior, b.posterior, rtol=1e-10, atol=1e-12)
        for a, b in pairs
    )
