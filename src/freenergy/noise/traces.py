"""Traces of stored negatives, kept as they are drawn: the base does not compute again what their features are made of.

    shard-00000.trace.safetensors      of the windows of that shard, [M, 1 + K, …], the datum first

It holds ``states`` of the layers that the file names, and ``log_p``, ``entropy``, ``log_rank`` and ``mask`` of every
place, as in ``lm.activations``, in float32. Where a shard has no trace, or one of other layers, the base reads the
strings again.

Legend: M windows of a shard, K negatives of each, L tokens at most.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from freenergy.core.files import RERUN, atomic_write, corruption_as_user_error, intact
from freenergy.lm.activations import Trace

_WHAT = "traced"  # one entry: several are written in any order, and files of equal content must have equal bytes


class Traced(NamedTuple):
    """Which states a trace has: of these layers, at the places that predicted the tokens or after each token."""

    layers: tuple[int, ...]
    after: bool = False


def trace_path(shard: Path) -> Path:
    """Return where the trace of a shard of negatives is."""
    return shard.with_suffix(".trace.safetensors")


def write_trace(shard: Path, trace: Trace, what: Traced) -> None:
    """Write the trace of a shard; the shard itself follows, so that where it is there, so is its trace."""
    arrays = {name: value.float() if value.is_floating_point() else value for name, value in trace._asdict().items()}
    with atomic_write(trace_path(shard)) as aside:
        arrays = {name: value.cpu().contiguous() for name, value in arrays.items()}
        save_file(arrays, aside, metadata={_WHAT: json.dumps(what)})


def read_trace(shards: Sequence[Path], size: int, index: Int[Tensor, " batch"], what: Traced) -> Trace | None:
    """Return the trace of the windows at these positions of a store with ``size`` windows per shard, if it is there."""
    parts, places = list[Trace](), list[Tensor]()
    for k in (index // size).unique().tolist():
        at = (index // size == k).nonzero().flatten()
        part = _read_rows(trace_path(shards[k]), index[at] - k * size, what)
        if part is None:
            return None
        parts.append(part)
        places.append(at)
    back = torch.cat(places).argsort()
    return Trace(*(numbers[back] for numbers in Trace.cat(parts, dim=0)))


def read_data_log_prob(
    shards: Sequence[Path], size: int, index: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"] | None:
    """Return log P of the true continuations at these positions, which were read as their negatives were drawn."""
    found = torch.zeros(len(index), dtype=torch.float64)
    for k in (index // size).unique().tolist():
        at = (index // size == k).nonzero().flatten()
        path = trace_path(shards[k])
        if not path.is_file():
            return None
        with corruption_as_user_error(path, RERUN), safe_open(intact(path), framework="pt") as file:
            found[at] = file.get_slice("log_p")[:, :1][index[at] - k * size].double().sum((1, 2))
    return found


def _read_rows(path: Path, rows: Int[Tensor, " some"], what: Traced) -> Trace | None:
    """Read from the first to the last of the rows, and no others."""
    if not path.is_file():
        return None
    first, last = int(rows.min()), int(rows.max())
    with corruption_as_user_error(path, RERUN), safe_open(intact(path), framework="pt") as file:
        layers, after = json.loads(file.metadata()[_WHAT])
        if not set(what.layers) <= set(layers) or what.after != after:
            return None
        found = {name: file.get_slice(name)[first : last + 1] for name in Trace._fields}
    trace = Trace(**{name: value[rows - first] for name, value in found.items()})
    return trace.of_layers([layers.index(layer) for layer in what.layers])
