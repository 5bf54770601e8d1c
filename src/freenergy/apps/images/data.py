"""Images as rows of levels: the idx files of MNIST, the binary version of CIFAR-10, and batches for training.

    idx      0x00000803, count, height, width (four big-endian numbers of 4 bytes), then a byte a pixel
    CIFAR    for each image its label (1 byte), then 32 × 32 of red, of green and of blue

    stochastic:  x = 1[u < intensity / 255],  u ~ Uniform[0, 1) once for each pixel of each image

The law of "stochastic" is that of Salakhutdinov and Murray (2008), whose draw is a file of its own; ours comes from
a named stream in which every image has its numbers, whatever other images are read.

    row r of micro-batch m of step s = image order_e[k],   k + e · N = ((s − 1) · accumulate + m) · size + r

Every epoch e reads the N images in another order, from the seed. A fake row shares the first ``known`` pixels with its
image; ``known`` is uniform among the places that leave room for ``fake`` more, one for all rows of a micro-batch, so
that in time every place is drawn from.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Batch

Binarise = Literal["stochastic", "threshold", "none"]
Pixels = UInt8[np.ndarray, "_images height width channels"]  # a byte for each channel of each pixel
_IDX_IMAGES = 0x00000803
_IDX_HEADER = struct.Struct(">4I")
_CIFAR_SIDE = 32
_CIFAR_RECORD = 1 + 3 * _CIFAR_SIDE**2
_BATCH_SIZE = 4096  # images per batch of random numbers
_HELD_OUT_ROWS = 100  # per batch
_GET = (
    "put train-images-idx3-ubyte and t10k-images-idx3-ubyte of MNIST there (with .gz or without), or "
    "data_batch_1.bin … data_batch_5.bin and test_batch.bin of CIFAR-10"
)


def read_images(folder: Path) -> tuple[Pixels, Pixels]:
    """Return training and test images of a folder, MNIST or CIFAR-10."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} with images: create it, and {_GET}")
    if (first := _idx_path(folder, "train")) and (second := _idx_path(folder, "t10k")):
        train, test = read_idx(first)[..., None], read_idx(second)[..., None]
    elif parts := sorted(folder.glob("data_batch_*.bin")):
        train, test = np.concatenate([read_cifar(part) for part in parts]), read_cifar(folder / "test_batch.bin")
    else:
        raise UserError(f"the folder {folder} contains neither MNIST nor CIFAR-10: {_GET}")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"training and test images in {folder} differ in size: download both from the same source")
    return train, test


def read_idx(path: Path) -> UInt8[np.ndarray, "images height width"]:
    """Return the images of an idx file, gzipped or plain."""
    data = _content(path)
    if len(data) < _IDX_HEADER.size or _IDX_HEADER.unpack_from(data)[0] != _IDX_IMAGES:
        raise UserError(f"{path} is not an idx file of images: download it again")
    _, count, height, width = _IDX_HEADER.unpack_from(data)
    got, wanted = len(data) - _IDX_HEADER.size, count * height * width
    if got != wanted or not wanted:
        raise UserError(f"{path} has {got} bytes of pixels, not the {wanted} of its header: download it again")
    return np.frombuffer(data, np.uint8, offset=_IDX_HEADER.size).reshape(count, height, width)


def read_cifar(path: Path) -> UInt8[np.ndarray, "images 32 32 3"]:
    """Return the images of one binary batch of CIFAR-10, without their labels."""
    data = _content(path)
    if not data or len(data) % _CIFAR_RECORD:
        raise UserError(f"{path} has {len(data)} bytes, not a multiple of {_CIFAR_RECORD}: download it again")
    planes = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)[:, 1:]
    return np.ascontiguousarray(planes.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE).transpose(0, 2, 3, 1))


def as_tokens(images: Pixels, how: Binarise, rng: Rng) -> UInt8[Tensor, "images pixels"]:
    """Return images as rows of levels in raster order, channel last; image n has its own random stream."""
    rows = images.reshape(len(images), -1)
    match how:
        case "none":
            return torch.from_numpy(rows.copy())
        case "threshold":
            return torch.from_numpy((rows >= 128).astype(np.uint8))
        case "stochastic":
            parts = range(0, len(rows), _BATCH_SIZE)
            levels = [(n, torch.from_numpy(rows[n : n + _BATCH_SIZE].copy())) for n in parts]
            drawn = [rng.child(n).uniform(*part.shape) < part.double() / 255 for n, part in levels]
            return torch.cat(drawn).to(torch.uint8)


def _idx_path(folder: Path, split: str) -> Path | None:
    """Return the file of a split, by any of its usual names."""
    names = [f"{split}-images{dot}idx3-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _content(path: Path) -> bytearray:
    """Return all bytes of a file, decompressed, as a writable array."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bytearray(file.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is truncated or damaged ({error}): download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {_GET}") from None


@final
class ImageData:
    """Images as rows of levels: an endless stream of training batches, and held-out images."""

    def __init__(
        self,
        train: UInt8[Tensor, "images pixels"],
        held_out: UInt8[Tensor, "others pixels"],
        *,
        batch_size: int,
        accumulate: int,
        fake: int,
        rng: Rng,
    ) -> None:
        self.train, self._held_out = train, held_out
        self.pixels = train.shape[1]
        if fake > self.pixels:
            raise UserError(f"fake is {fake}, more than the {self.pixels} pixels of an image: set it lower")
        self.batch_size, self.accumulate, self.fake, self.rng = batch_size, accumulate, fake, rng
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def epoch_steps(self) -> int:
        """The steps of about one epoch."""
        return max(1, len(self.train) // self.batch_size)

    def batch(self, step: int, micro: int) -> Batch:
        """Return the rows of a micro-batch."""
        size = self.batch_size // self.accumulate
        number = (step - 1) * self.accumulate + micro
        rows = torch.tensor([self._image(index) for index in range(number * size, (number + 1) * size)])
        u = self.rng.child("known", number).uniform(1).item()
        return _batch(self.train[rows], int(u * (self.pixels - self.fake + 1)))

    def held_out(self) -> Iterator[Batch]:
        """Yield the validation images, in order."""
        for part in self._held_out.split(_HELD_OUT_ROWS):
            yield _batch(part, 0)

    def _image(self, index: int) -> int:
        epoch, place = divmod(index, len(self.train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.rng.child("epoch", epoch).permutation(len(self.train))
        return int(self._order[place])


def _batch(levels: UInt8[Tensor, "rows pixels"], known: int) -> Batch:
    tokens: Int[Tensor, "rows pixels"] = levels.long()
    return Batch(None, tokens, torch.ones_like(tokens, dtype=torch.bool), known)
