"""Features of stored windows, computed once for all energies of a run that read them alike, and read piece by piece.

    features/<mark>/00032.safetensors      of the windows from the 32nd on, [windows, 1 + K, F], the datum first
    φ [M, 1 + K, F] = piece, piece, …  →  z [M, 1 + K, F], standardised, in one flat file that is mapped from disk

The mark names what the features depend on: the energy's settings and counts, the windows with their draws (which name
the base, the tokenizer and the corpus), and the length that they are cut to. An energy that is fitted again, alone or
in another product, finds them. A fit looks at all features some hundred times, and they do not fit into memory: φ is
read a few times, to know its means and to write z, and then every evaluation goes over z through the operating system's
page cache.

Legend: M windows, K negatives of each, F features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.compatibility import ERA
from freenergy.core.files import disk_full_as_user_error, fingerprint, read_tensors, write_tensors
from freenergy.core.progress import Progress
from freenergy.core.roles import Energy
from freenergy.core.sequences import Continuations
from freenergy.energies.call import check_energies, energies_in_batches
from freenergy.energies.features import FeatureEnergy
from freenergy.energies.module import ActivationEnergy, EnergySum
from freenergy.lm.activations import Trace
from freenergy.noise.traces import Traced
from freenergy.training.contrastive_batches import StoredContrast, cut


@final
class Pieces:
    """Features of M windows in order; every iteration reads them again.

    >>> two = Pieces((3, 1, 1), lambda: iter([torch.ones(2, 1, 1), torch.zeros(1, 1, 1)]))
    >>> [len(piece) for piece in two.some(torch.tensor([False, True, True]))]
    [1, 1]
    """

    def __init__(self, shape: tuple[int, int, int], read: Callable[[], Iterator[Tensor]]) -> None:
        self.shape, self._read = shape, read

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


@final
@dataclass(frozen=True)
class FeatureCache:
    """Reads windows in chunks of ``batch_size``, cut to ``length`` if any."""

    folder: Path
    contrast: StoredContrast
    leave_self_out: bool = field(kw_only=True)  # the windows are of the training text
    batch_size: int = field(default=32, kw_only=True)
    length: int | None = field(default=None, kw_only=True)

    def chunks(self) -> Iterator[Int[Tensor, " chunk"]]:
        """Return the windows in order, chunk by chunk."""
        return map(self.chunk, range(-(-len(self.contrast) // self.batch_size)))

    def chunk(self, k: int) -> Int[Tensor, " chunk"]:
        """Return the windows of chunk k."""
        return torch.arange(k * self.batch_size, min((k + 1) * self.batch_size, len(self.contrast)))

    def pieces(self, energy: FeatureEnergy, label: str, progress: Progress) -> Pieces:
        """Load features of all windows [M, 1 + K, F] by chunks; what is not on disk is computed, with a bar."""
        with progress.track(f"features of {type(energy).__name__}, {label}", len(self.contrast), "windows") as advance:
            for chunk in self.chunks():
                self.features(energy, chunk)
                advance(len(chunk))
        shape = (len(self.contrast), 1 + self.contrast.store.per_prefix, len(energy.names))
        return Pieces(shape, lambda: (self.features(energy, chunk) for chunk in self.chunks()))

    def features(self, energy: FeatureEnergy, chunk: Int[Tensor, " chunk"]) -> Float[Tensor, "chunk candidates F"]:
        """Return features of one chunk, float32: from traces that the store kept, or from disk if they are there."""
        if (trace := self._trace(energy, chunk)) is not None:
            assert isinstance(energy, ActivationEnergy), "no other energy has features of traces"
            return energy.features_of(trace).float()
        path = _path(self.place(energy), chunk)
        if not path.is_file():
            x = self._strings(chunk)
            found = own_features(energy, x) if self.leave_self_out else energy.features(x)
            write_tensors(path, {"features": found.float().cpu().contiguous()})
        return read_tensors(path)["features"]

    def place(self, energy: FeatureEnergy) -> Path:
        """Return the folder of the shards of an energy's features."""
        about = [
            ERA,
            energy.fingerprint,
            self.contrast.store.fingerprint,
            self.leave_self_out,
            self.batch_size,
        ]
        return self.folder / fingerprint(about if self.length is None else [*about, self.length])

    def missing(self, energy: FeatureEnergy) -> list[int]:
        """Return the numbers of the chunks whose features are not there."""
        place, chunks = self.place(energy), enumerate(self.chunks())
        unread = [(k, chunk) for k, chunk in chunks if not _path(place, chunk).is_file()]
        return [k for k, chunk in unread if self._trace(energy, chunk[[0, -1]]) is None]

    def _trace(self, energy: FeatureEnergy, chunk: Int[Tensor, " chunk"]) -> Trace | None:
        """Return what the base computed as the chunk's negatives were drawn, if it was kept and the energy reads it."""
        if self.length is not None or not isinstance(energy, ActivationEnergy):
            return None
        return self.contrast.store.trace(chunk, Traced(energy.layers, energy.after))

    def _strings(self, chunk: Int[Tensor, " chunk"]) -> Continuations:
        x = self.contrast.all(chunk)
        return x if self.length is None else cut(x, self.length)

    @torch.no_grad()
    def energies(self, energy: Energy, chunk: Int[Tensor, " chunk"], rows: int) -> Float[Tensor, "chunk candidates"]:
        """Compute E of one chunk, float64: linear energies from features, networks with ``rows`` strings per call."""
        if isinstance(energy, EnergySum):
            return torch.stack([scale * self.energies(part, chunk, rows) for scale, part in energy.terms()]).sum(0)
        where = "stored windows"
        if not isinstance(energy, FeatureEnergy):
            return energies_in_batches(energy, self._strings(chunk), batch_size=rows, where=where)
        E = energy.energy_of(self.features(energy, chunk)).double().cpu()
        return check_energies(E, energy, (len(chunk), 1 + self.contrast.store.per_prefix), where=where)

    def all_energies(self, energy: nn.Module, rows: int) -> Float[Tensor, "M candidates"]:
        """Compute E of every window."""
        return torch.cat([self.energies(energy, chunk, rows) for chunk in self.chunks()])


PrefetchFn = Callable[[FeatureEnergy, FeatureCache, str, Progress], None]


def _path(place: Path, chunk: Int[Tensor, " chunk"]) -> Path:
    return place / f"{int(chunk[0]):05d}.safetensors"


def own_features(energy: FeatureEnergy, x: Continuations) -> Float[Tensor, "B N F"]:
    """Return features of training windows: the datum, in the first column, does not count its own occurrence."""
    if not energy.knows_text:
        return energy.features(x)
    data = energy.features(x.candidates(slice(0, 1)), leave_self_out=True)
    return torch.cat([data, energy.features(x.candidates(slice(1, None)))], dim=1)


def own_energies(energy: nn.Module, x: Continuations) -> Float[Tensor, "B N"]:
    """Compute E of training windows, float64, by reading them."""
    if isinstance(energy, EnergySum):
        return torch.stack([scale * own_energies(part, x) for scale, part in energy.terms()]).sum(0)
    if isinstance(energy, FeatureEnergy):
        return check_energies(energy.energy_of(own_features(energy, x)).double().cpu(), energy, x.shape)
    return energies_in_batches(energy, x)
