"""Encodes documents into one stream of tokens per split, in resumable steps.

    shard k = the tokens of the k-th 16 MB of text;      stream of a split = its documents, each followed by EOS

A shard appears whole or not at all. After a crash the text is read again, which is quick, and only missing shards are
encoded. The grouping depends on the text alone, so the streams have the same bits however often work was interrupted.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, final

import numpy as np
from safetensors.numpy import save_file

from freenergy.core.files import atomic_write, read_arrays
from freenergy.core.workers.pool import IN_PROCESS, WorkerPool
from freenergy.core.workers.shards import map_unless_single
from freenergy.corpus.documents import DocumentPiece
from freenergy.corpus.settings import SPLITS
from freenergy.corpus.tokenizer import Tokenizer

SHARD_BYTES = 16 << 20
_BATCH_BYTES = 1 << 18  # the library needs some hundred bytes per token of a batch; larger is not faster

Tagged = Iterable[tuple[str, DocumentPiece]]
SizedPiece = tuple[str, DocumentPiece, int]  # split, piece, bytes
Group = list[SizedPiece]
Array = np.ndarray


@final
@dataclass(slots=True)
class StreamCount:
    """The size of a split's stream; ``tokens`` counts EOS, ``bytes`` are those of the text."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


def token_type(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens: two bytes if they suffice, else four; little-endian."""
    return np.dtype("<u2" if vocab_size < 1 << 16 else "<u4")


def encode_shards(
    tagged: Tagged, tokenizer: Tokenizer, folder: Path, shard_bytes: int, workers: WorkerPool = IN_PROCESS
) -> int:
    """Encode missing shards and return their number; this process reads the text, workers encode it."""
    count = 0

    def missing() -> Iterator[tuple[int, Group]]:
        nonlocal count
        sized = ((split, piece, len(piece.text.encode())) for split, piece in tagged)
        for group in _groups(sized, shard_bytes):
            if not _shard(folder, count).exists():
                yield count, group
            count += 1

    with closing(map_unless_single(workers, partial(_make, folder.resolve(), tokenizer), missing())) as results:
        for _ in results:
            pass
    return count


def _make(folder: Path, tokenizer: Tokenizer, item: tuple[int, Group]) -> None:
    k, group = item
    with atomic_write(_shard(folder, k)) as temporary:
        save_file(_encode(group, tokenizer), temporary)


def join_shards(folder: Path, count: int, splits: Sequence[str], out: Path) -> dict[str, StreamCount]:
    """Write ``<split>.bin`` (tokens) and ``<split>.documents.npy`` (where each begins, and the end of the last)."""
    counts = {split: StreamCount() for split in splits}
    ends: dict[str, list[Array]] = {split: [np.zeros(1, dtype=np.int64)] for split in splits}
    with ExitStack() as stack:
        files = {split: _open(stack, out / f"{split}.bin") for split in splits}
        for k in range(count):
            shard = read_arrays(_shard(folder, k))
            for split in splits:
                ends[split].append(_append(shard, SPLITS.index(split), files[split], counts[split]))
    for split in splits:
        write_array(out / f"{split}.documents.npy", np.concatenate(ends[split]))
    return counts


def write_array(path: Path, array: Array) -> None:
    """Write a .npy file via memory: numpy's own file writer does not report a full disk."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    with atomic_write(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def _open(stack: ExitStack, path: Path) -> IO[bytes]:
    temporary = stack.enter_context(atomic_write(path))
    return stack.enter_context(temporary.open("wb"))


def _shard(folder: Path, k: int) -> Path:
    return folder / f"{k:06d}.safetensors"


def _groups(pieces: Iterable[SizedPiece], max_bytes: int) -> Iterator[Group]:
    """Yield groups of pieces; each ends with the piece that fills it."""
    group: Group = []
    held = 0
    for piece in pieces:
        group.append(piece)
        held += piece[2]
        if held >= max_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group


def _encode(group: Group, tokenizer: Tokenizer) -> dict[str, Array]:
    """Return the tokens of the pieces, EOS after each last one, and split, length and bytes of each piece."""
    kind = token_type(tokenizer.vocab_size)
    tokens: list[Array] = []
    lengths: list[int] = []
    for batch in _groups(group, _BATCH_BYTES):
        rows = tokenizer.encode_batch([piece.text for _, piece, _ in batch])
        for ids, (_, piece, _) in zip(rows, batch, strict=True):
            if piece.is_last:
                ids.append(tokenizer.eos)
            lengths.append(len(ids))
        tokens.append(np.fromiter(chain.from_iterable(rows), dtype=kind, count=sum(map(len, rows))))
    return {
        "tokens": np.concatenate(tokens),
        "lengths": np.array(lengths, dtype=np.int64),
        "splits": np.array([SPLITS.index(split) for split, _, _ in group], dtype=np.uint8),
        "is_last": np.array([piece.is_last for _, piece, _ in group], dtype=np.uint8),
        "bytes": np.array([size for _, _, size in group], dtype=np.int64),
    }


def _append(shard: dict[str, Array], split: int, file: IO[bytes], count: StreamCount) -> Array:
    """Add the shard's tokens of one split to its stream; where its documents end."""
    mine = shard["splits"] == split
    file.write(shard["tokens"][np.repeat(mine, shard["lengths"])].tobytes())
    places = count.tokens + np.cumsum(shard["lengths"][mine])
    ends: Array = places[shard["is_last"][mine].astype(bool)]
    count.documents += len(ends)
    count.tokens += int(shard["lengths"][mine].sum())
    count.bytes += int(shard["bytes"][mine].sum())
    return ends
