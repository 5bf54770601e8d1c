"""Windows read chunk by chunk: a chunk window is a window whose prefix has grown.

    chunk k of a window:  prefix = p + k·m true tokens,   continuation = the next min(m, ℓ − k·m) tokens
    its room            = min(m, L − k·m)                 what a draw may fill; the last chunk may be shorter

ℓ is the length of the window's continuation, which EOS may have ended before L. The chunks of a window come one after
the other; with several sizes m, all chunk windows of the first size come before those of the next.
"""

from typing import NamedTuple, final

import numpy as np
from jaxtyping import Integer

from freenergy.core.errors import UserError


class ChunkPlaces(NamedTuple):
    """Where chunk windows are: the window of each, how many of its tokens come before, and the maximum of tokens."""

    window: Integer[np.ndarray, " rows"]
    skipped: Integer[np.ndarray, " rows"]
    room: Integer[np.ndarray, " rows"]
    size: Integer[np.ndarray, " rows"]


@final
class Chunks:
    """The numbering of the chunk windows of W windows with continuations of ``lengths`` tokens, at most L."""

    def __init__(self, lengths: Integer[np.ndarray, " W"], longest: int, sizes: tuple[int, ...]) -> None:
        check_chunks(sizes, longest)
        self.sizes, self._longest = np.array(sizes, dtype=np.int64), longest
        self._ends = [np.cumsum(-(-lengths.astype(np.int64) // m)) for m in sizes]  # of each window's chunks
        self._firsts = np.cumsum([0, *(int(ends[-1]) if len(ends) else 0 for ends in self._ends)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def at(self, rows: Integer[np.ndarray, " rows"]) -> ChunkPlaces:
        """Return where the chunk windows with these numbers are."""
        which = np.searchsorted(self._firsts, rows, side="right") - 1
        window, skipped = np.zeros_like(rows), np.zeros_like(rows)
        for i, (m, ends) in enumerate(zip(self.sizes, self._ends, strict=True)):
            mine = which == i
            own = rows[mine] - self._firsts[i]
            window[mine] = np.searchsorted(ends, own, side="right")
            skipped[mine] = (own - np.concatenate([[0], ends])[window[mine]]) * m
        size = self.sizes[which]
        return ChunkPlaces(window, skipped, np.minimum(size, self._longest - skipped), size)

    def of_windows(self, windows: Integer[np.ndarray, " some"]) -> Integer[np.ndarray, " rows"]:
        """Return the numbers of all chunks of some windows, in the order of the text; chunks of the first size."""
        ends = self._ends[0]
        begins = np.concatenate([[0], ends])[windows]
        return np.concatenate([np.arange(a, b) for a, b in zip(begins, ends[windows], strict=True)] or [begins])


def check_chunks(sizes: tuple[int, ...], longest: int) -> None:
    """Refuse lengths of chunks that a continuation of ``longest`` tokens cannot be cut into."""
    if not sizes or len(set(sizes)) < len(sizes) or not all(1 <= m <= longest for m in sizes):
        raise UserError(
            f"chunk is {list(sizes)}: give one or several different numbers of tokens, each at least 1 and at most the "
            f"{longest} of corpus.continuation"
        )
