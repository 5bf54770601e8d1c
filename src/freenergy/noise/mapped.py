"""Stored negatives as one flat file, read through the operating system's page cache.

    shards (Parquet) → .flat/draws.bin   a record per window: log_base [K], log_proposal [K], lengths [K], tokens [K, L]
                       .flat/windows.bin the windows' numbers [M]
                       .flat/flat.json   what they were made of, with checksums, written last

A shard is compressed and must be read whole; a record stands where its number says, so a batch is read where it stands
and nothing else is. The flat file is made once, shard by shard, and has the same bytes whoever makes it: two processes
that make it at the same time do no harm. Where it is missing, torn or of other shards it is made again.

Legend: M windows, K negatives of each, L tokens at most.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.checksums import FLAT, digest_matches, write_with_checksums
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, fingerprint, intact, read_json
from freenergy.core.sequences import SequenceSpace
from freenergy.corpus.shards import token_type

_FOLDER, _DRAWS, _WINDOWS = ".flat", "draws.bin", "windows.bin"
_BATCH_SIZE = 1 << 16  # numbers that are formatted at a time


class Flat(NamedTuple):
    """The mapped records, the windows' numbers, and whether all draws are plain ones of the base."""

    draws: np.ndarray
    windows: Int[Tensor, " M"]
    is_plain: bool


def open_flat(folder: Path, about: Any, record: np.dtype, tables: Callable[[], Iterable[pa.Table]]) -> Flat:
    """Map the flat file of the store in ``folder``; ``about`` names its shards, ``tables`` reads them one by one."""
    flat, key = folder / _FOLDER, fingerprint(about)
    found = _opened(flat, key, record)
    if found is None:
        _make(flat, key, record, tables())
        found = _opened(flat, key, record)
    if found is None:
        raise UserError(f"{flat} cannot be read back as it was written: delete that folder and run it again")
    return found


def flat_record(space: SequenceSpace, per_prefix: int) -> np.dtype:
    """One window's negatives, in the smallest types that hold the vocabulary and the length."""
    K, L = per_prefix, space.length
    numbers = [("log_base", "<f8", (K,)), ("log_proposal", "<f8", (K,))]
    return np.dtype([*numbers, ("lengths", token_type(L), (K,)), ("tokens", token_type(space.vocab_size), (K, L))])


def list_fingerprint(numbers: Int[Tensor, " some"], before: str = "", after: str = "") -> str:
    """``storage.fingerprint`` of a list of whole numbers between other JSON, without the list in memory.

    >>> list_fingerprint(torch.tensor([3, 1]), '[{"a":1},', "]") == fingerprint([{"a": 1}, [3, 1]])
    True
    """
    digest = hashlib.sha256(f"{before}[".encode())
    for first in range(0, len(numbers), _BATCH_SIZE):
        spelled = ",".join(map(str, numbers[first : first + _BATCH_SIZE].tolist()))
        digest.update(f"{',' * (first > 0)}{spelled}".encode())
    digest.update(f"]{after}".encode())
    return digest.hexdigest()[:16]


def _opened(flat: Path, key: str, record: np.dtype) -> Flat | None:
    """Returns the mapped file, or None where it is incomplete or was made of other shards."""
    try:
        about, sizes = read_json(flat / FLAT), [(flat / name).stat().st_size for name in (_DRAWS, _WINDOWS)]
    except (UserError, OSError):
        return None
    M = about.get("windows")
    is_plain = about.get("is_plain")
    if about.get("key") != key or not isinstance(M, int) or not isinstance(is_plain, bool) or not digest_matches(about):
        return None
    if sizes != [M * record.itemsize, M * 8]:
        return None
    try:
        windows = torch.from_numpy(np.fromfile(intact(flat / _WINDOWS), dtype="<i8"))
        intact(flat / _DRAWS)
    except UserError:
        return None
    return Flat(np.memmap(flat / _DRAWS, dtype=record, mode="r"), windows, is_plain)


def _make(flat: Path, key: str, record: np.dtype, tables: Iterable[pa.Table]) -> None:
    """Write the records shard by shard."""
    K, numbers, is_plain = record["log_base"].shape[0], [], True
    with atomic_write(flat / _DRAWS) as aside, aside.open("wb") as file:
        for table in tables:
            draws = _records(table, record)
            file.write(draws.tobytes())  # not tofile, which does not say that the disk is full
            numbers.append(table.column("window").to_numpy()[::K].astype("<i8"))
            is_plain &= table.column("source").unique().to_pylist() == ["base"]
            is_plain &= np.array_equal(draws["log_base"], draws["log_proposal"])
    with atomic_write(flat / _WINDOWS) as aside:
        aside.write_bytes(np.concatenate(numbers).tobytes())
    write_with_checksums(flat / FLAT, {"key": key, "windows": sum(map(len, numbers)), "is_plain": is_plain})


def _records(table: pa.Table, record: np.dtype) -> np.ndarray:
    """One shard's windows, their tokens padded on the right."""
    found = np.zeros(table.num_rows // record["log_base"].shape[0], dtype=record)
    for name in ("log_base", "log_proposal"):
        found[name] = table.column(name).to_numpy().reshape(found[name].shape)
    lists = pa.concat_arrays(table.column("tokens").chunks)
    found["lengths"] = lists.value_lengths().to_numpy().reshape(found["lengths"].shape)
    is_token = np.arange(found["tokens"].shape[2]) < found["lengths"][..., None]
    found["tokens"][is_token] = lists.flatten().to_numpy()  # a field is a view: this writes into the records
    return found
