"""Features that are read piece by piece, and their standardised copy as one flat file.

    φ [M, 1 + K, F] = piece, piece, …  →  z [M, 1 + K, F], mapped from disk

A fit looks at all features some hundred times, and they do not fit into memory: φ is read a few times, to know its
means and to write z, and then every evaluation goes over z through the operating system's page cache.

Legend: M windows, K negatives of each, F features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.files import disk_full_as_user_error


@final
class Pieces:
    """Features of M windows in order; every iteration reads them again.

    >>> two = Pieces((3, 1, 1), lambda: iter([torch.ones(2, 1, 1), torch.zeros(1, 1, 1)]))
    >>> [len(piece) for piece in two.some(torch.tensor([False, True, True]))]
    [1, 1]
    """

    def __init__(self, shape: tuple[int, int, int], read: Callable[[], Iterator[Tensor]]) -> None:
        self.shape, self._read = shape, read

    @classmethod
    def of(cls, data: Float[Tensor, "M 1 F"], negatives: Float[Tensor, "M K F"]) -> "Pieces":
        """Wrap features in memory as one piece."""
        M, K, F = negatives.shape
        return cls((M, 1 + K, F), lambda: iter([torch.cat([data, negatives], dim=1)]))

    @staticmethod
    def joined(parts: "Sequence[Pieces]") -> "Pieces":
        """Return the windows of all of them, one after the other."""
        _, candidates, F = parts[0].shape
        rows = sum(part.shape[0] for part in parts)
        return Pieces((rows, candidates, F), lambda: (piece for part in parts for piece in part))

    def some(self, keep: Bool[Tensor, " M"]) -> "Pieces":
        """Return the windows where ``keep`` is true."""

        def read() -> Iterator[Tensor]:
            first = 0
            for piece in self:
                kept = piece[keep[first : first + len(piece)]]
                first += len(piece)
                if len(kept):
                    yield kept

        return Pieces((int(keep.sum()), *self.shape[1:]), read)

    def __iter__(self) -> Iterator[Tensor]:
        return self._read()


def laid_flat(pieces: Iterable[Tensor], shape: tuple[int, int, int], folder: Path | None) -> np.ndarray:
    """Write all pieces as one array [M, 1 + K, F]: in memory, or mapped from a nameless file in ``folder``.

    The file has no name from the beginning, so that whatever ends the process frees its room.
    """
    if folder is None:
        return np.concatenate([piece.cpu().numpy() for piece in pieces])
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(np.float32)
    with disk_full_as_user_error(folder), TemporaryFile(dir=folder, prefix=".", suffix=".part") as file:
        for piece in pieces:
            array = piece.cpu().numpy()
            kind = array.dtype
            file.write(array.tobytes())
        file.flush()
        return np.asarray(np.memmap(file, dtype=kind, mode="r", shape=shape))
