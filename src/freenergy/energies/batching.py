"""Strings in batches that keep the processor busy, whatever a caller passes at once.

    a batch:   rows × (tokens of its longest row) ≤ budget / width of the states

Rows are sorted by length, the longest first, so that a batch holds rows of nearly one length and little padding is
read. A context whose prefix can be shared is read once, and then its continuations batch by batch. Energies do not
depend on the batches by more than rounding. With gradients there is one batch: training chooses its own size.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.sequences import Continuations, Sequences
from freenergy.energies.trunk import States, Trunk

_BUDGET = 1_000_000  # numbers of one layer's states; from a quarter to twice as many no difference was measured
_FEWEST = 512  # tokens: below that a batch takes rows of other lengths too
_PADDING = 8  # one token in 8 may be padding
_PORTION = 256  # strings that cross from one tokenizer to another at once
Marks = tuple[Bool[Tensor, "B P"], Bool[Tensor, "B N L"]]  # which tokens of prefixes and continuations count
Read = Callable[[States, Continuations], Tensor]
Placed = tuple[Tensor, Tensor, Tensor]  # contexts, columns, and what was found for them
Item = TypeVar("Item")
Found = TypeVar("Found")


def wants_gradients(module: nn.Module) -> bool:
    """Tell whether what the module computes of tokens may be differentiated; of ``Soft`` inputs it always may."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())


def batches(lengths: Int[Tensor, " R"], width: int) -> list[Int[Tensor, " some"]]:
    """Return row numbers, batch by batch, the longest rows first.

    >>> [batch.tolist() for batch in batches(torch.tensor([300, 600, 300, 600, 599]), 512)]
    [[1, 3, 4], [0, 2]]
    """
    max_tokens, order = max(_BUDGET // width, 1), lengths.argsort(descending=True, stable=True)
    found, first, tokens, sorted_lengths = [], 0, 0, lengths[order].tolist()
    for i, length in enumerate(sorted_lengths):
        padded = sorted_lengths[first] * (i + 1 - first)
        is_padded = tokens >= _FEWEST and (padded - tokens - length) * _PADDING > padded
        if i > first and (padded > max_tokens or is_padded):
            found.append(order[first:i])
            first, tokens = i, 0
        tokens += length
    return [*found, order[first:]] if len(order) else found


@torch.no_grad()
def in_batches(x: Continuations, trunk: Trunk, read: Read, marks: Marks | None = None) -> Float[Tensor, "B N"]:
    """Apply ``read`` to the states of each string, without gradients; ``marks`` replace the masks of x."""
    trunk.check(x)
    found = list((_after_prefixes if trunk.shares_prefix else _one_by_one)(x, trunk, read, marks))
    E = found[0][2].new_zeros(x.shape) if found else torch.zeros(x.shape, dtype=trunk.dtype, device=trunk.device)
    for b, n, values in found:
        E[b, n] = values
    return E


def _one_by_one(x: Continuations, trunk: Trunk, read: Read, marks: Marks | None) -> Iterator[Placed]:
    """Read whole strings of any context side by side."""
    assert marks is None, "marked strings share their prefix"
    N, lengths = x.shape[1], (x.contexts.lengths.unsqueeze(1) + x.lengths).flatten()
    for some in batches(lengths.cpu(), trunk.width):
        b, n = some // N, some % N
        part = Continuations(x.contexts[b], x.tokens[b, n].unsqueeze(1), x.lengths[b, n].unsqueeze(1)).trimmed()
        yield b, n, read(trunk(part), part).squeeze(1)


def _after_prefixes(x: Continuations, trunk: Trunk, read: Read, marks: Marks | None) -> Iterator[Placed]:
    """Read several contexts per batch where they fit; otherwise one, and its continuations batch by batch."""
    N, L, P = *x.tokens.shape[1:], x.contexts.tokens.shape[1]
    batch_size = max(1, _BUDGET // trunk.width // max(N * L, P, 1))
    for b in x.contexts.lengths.cpu().argsort(descending=True, stable=True).split(batch_size) if N else ():
        some, contexts = x[b], x.contexts[b].trimmed()
        states = trunk.after(contexts)
        for n in batches(some.lengths[0].cpu(), trunk.width) if batch_size == 1 else [torch.arange(N)]:
            part = Continuations(contexts, some.tokens[:, n], some.lengths[:, n]).trimmed()
            found = states(part)
            if marks is not None:
                width, longest = contexts.tokens.shape[1], part.tokens.shape[2]
                in_x = marks[1][b.unsqueeze(1), n][:, :, :longest]
                found = replace(found, prefix_mask=marks[0][b, :width].unsqueeze(1), mask=in_x)
            yield b.unsqueeze(1), n, read(found, part)


@torch.no_grad()
def rows_in_batches(
    rows: Sequences, in_prefix: Bool[Tensor, "R T"], in_x: Bool[Tensor, "R T"], trunk: Trunk, readout: nn.Module
) -> Float[Tensor, " R"]:
    """Compute E of whole strings whose tokens are marked."""
    E = torch.zeros(len(rows), dtype=trunk.dtype, device=trunk.device)
    for some in batches(rows.lengths.cpu(), trunk.width):
        part = rows[some].trimmed()
        T = part.tokens.shape[1]
        states = trunk.whole(part.to(trunk.device)).unsqueeze(1)
        of_prefix, of_x = (marks[some, :T].unsqueeze(1).to(trunk.device) for marks in (in_prefix, in_x))
        E[some] = readout(States(states, of_prefix, states, of_x)).squeeze(1)
    return E


def portions(B: int, N: int) -> list[tuple[slice, slice]]:
    """Return contexts and columns, some hundred strings at a time.

    >>> portions(1, 300)
    [(slice(0, 1, None), slice(0, 256, None)), (slice(0, 1, None), slice(256, 512, None))]
    """
    contexts = max(1, _PORTION // max(N, 1))
    rows, columns = range(0, B, contexts), range(0, N, _PORTION)
    return [(slice(b, b + contexts), slice(n, n + _PORTION)) for b in rows for n in columns]


def ahead(function: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[Found]:
    """Yield ``function`` of each item; a thread computes the next one while the current one is used."""
    if len(items) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(function, items[0])
        for item in items[1:]:
            found, waiting = waiting.result(), pool.submit(function, item)
            yield found
        yield waiting.result()
