"""Negatives on disk: drawn once, read in every epoch.

    shard-00000.parquet, shard-00001.parquet, …      each the negatives of M windows, one row a negative

A shard appears whole or not at all; after a crash only missing shards are drawn. Batches begin anew in every shard, so
that rounding does not depend on where work was interrupted, and a finished store has the same bytes. Every shard's
schema says what made it (``Identity``), and a store that another model, tokenizer or corpus made is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.corpus import Windows
from freenergy.errors import UserError
from freenergy.progress import Progress
from freenergy.protocols import Draws, NegativeSource
from freenergy.randomness import Rng
from freenergy.sequences import Continuations, Sequences, SequenceSpace
from freenergy.storage import fingerprint, whole

SCHEMA = pa.schema(
    [
        ("window", pa.int64()),
        ("candidate", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("log_base", pa.float64()),
        ("log_proposal", pa.float64()),
        ("source", pa.string()),
    ]
)
_KEY = b"freenergy"
_AGAIN = "delete the folder and run the negatives stage again"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What made the negatives. ``lm``, ``tokenizer``, ``corpus`` and ``sources`` are fingerprints."""

    lm: str
    tokenizer: str
    corpus: str
    split: str
    seed: int
    per_prefix: int
    sources: str
    space: SequenceSpace


_WORDS = {
    "lm": "language model",
    "tokenizer": "tokenizer",
    "corpus": "corpus",
    "split": "split",
    "seed": "seed",
    "per_prefix": "number of negatives a prefix",
    "sources": "mixture of sources",
    "space": "space of continuations",
}


def write_negatives(
    folder: Path,
    rows: Int[Tensor, " rows"],
    windows: Windows,
    source: NegativeSource,
    identity: Identity,
    rng: Rng,
    progress: Progress,
    *,
    shard: int = 64,
    batch: int = 16,
) -> None:
    """Draw negatives for the windows with these numbers, ``shard`` windows a file; what is there already is kept."""
    if len(rows) == 0:
        raise UserError(f"there are no windows to draw negatives for in the {identity.split} split: give more text")
    count = -(-len(rows) // shard)
    about = {"identity": asdict(identity), "rows": fingerprint(rows.tolist()), "shards": count}
    labels = names(source, identity.per_prefix)
    with progress.track(f"draws for {identity.split} prefixes", len(rows), "windows") as advance:
        for k in range(count):
            path, some = _path(folder, k), rows[k * shard : (k + 1) * shard]
            if path.exists():
                _check(path, _about(path), {**about, "shard": k})
                advance(len(some))
                continue
            parts = []
            for now in some.split(batch):
                parts.append(source.draw(now, windows.continuations(now), identity.per_prefix, rng))
                advance(len(now))
            _write(path, some, Draws.cat(parts, dim=0), labels, {**about, "shard": k})


def names(source: NegativeSource, num: int) -> list[str]:
    """What each of a window's ``num`` negatives is called in the store."""
    parts: Sequence[tuple[NegativeSource, int]] = getattr(source, "parts", ())
    if parts:
        return [name for part, count in parts for name in names(part, count)]
    inner: Any = source
    return [str(getattr(inner, "kind", type(inner).__name__.lower()))] * num


@final
class NegativeStore:
    """The negatives of some windows of a split, in memory."""

    def __init__(self, folder: Path, tables: Sequence[pa.Table], identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self.per_prefix = K = identity.per_prefix
        table = pa.concat_tables(tables).combine_chunks()
        self.rows = torch.from_numpy(table.column("window").to_numpy()[::K].copy())
        shape = (len(self.rows), K)
        self._log_base, self._log_proposal = (
            torch.from_numpy(table.column(name).to_numpy().copy()).view(shape) for name in ("log_base", "log_proposal")
        )
        self._tokens, self._lengths = _padded(table.column("tokens"), shape, identity.space.length)
        self._place = {int(row): i for i, row in enumerate(self.rows)}
        is_plain = set(table.column("source").unique().to_pylist()) == {"base"}
        self.is_relative = not is_plain or not torch.equal(self._log_base, self._log_proposal)

    @classmethod
    def open(cls, folder: Path, identity: Identity) -> "NegativeStore":
        """Read a store, or say what is missing, damaged, or made by something else."""
        first = _about(_path(folder, 0))
        tables = []
        for k in range(first["shards"]):
            path = _path(folder, k)
            _check(path, _about(path), {**first, "identity": asdict(identity), "shard": k})
            tables.append(_read(path, identity.per_prefix))
        return cls(folder, tables, identity)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Equal for two stores with the same negatives of the same windows."""
        return fingerprint([asdict(self.identity), self.rows.tolist()])

    def positions(self, rows: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Where windows with these numbers stand in the store."""
        missing = [row for row in rows.tolist() if row not in self._place]
        if missing:
            raise UserError(
                f"{self.folder} holds no negatives of window {missing[0]}: ask for its own windows (rows), or {_AGAIN}"
            )
        return torch.tensor([self._place[row] for row in rows.tolist()], dtype=torch.long)

    def draws(self, index: Int[Tensor, " batch"], contexts: Sequences) -> Draws:
        """The negatives at these positions; ``contexts`` are the prefixes of their windows."""
        x = Continuations(contexts, self._tokens[index].long(), self._lengths[index])
        return Draws(x, self._log_base[index], self._log_proposal[index])


def _path(folder: Path, k: int) -> Path:
    return folder / f"shard-{k:05d}.parquet"


def _write(path: Path, rows: Tensor, draws: Draws, labels: list[str], about: dict[str, Any]) -> None:
    K = len(labels)
    columns = [
        rows.repeat_interleave(K).numpy(),
        np.tile(np.arange(K, dtype=np.int32), len(rows)),
        [x for row in draws.x.lists() for x in row],
        draws.log_base.double().flatten().cpu().numpy(),
        draws.log_proposal.double().flatten().cpu().numpy(),
        labels * len(rows),
    ]
    schema = SCHEMA.with_metadata({_KEY: json.dumps(about, sort_keys=True)})
    with whole(path) as aside:
        pq.write_table(pa.table(columns, schema=schema), aside, compression="zstd", write_page_checksum=True)


def _about(path: Path) -> dict[str, Any]:
    """What a shard says of itself."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: run the negatives stage, which draws what is missing")
    try:
        about: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_KEY])
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise _damaged(path, error) from None
    if set(about) != {"identity", "rows", "shard", "shards"}:
        raise _damaged(path, "it does not say what made it")
    return about


def _check(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a shard that was made of other things."""
    for key, word in _WORDS.items():
        mine, theirs = wanted["identity"][key], found["identity"].get(key)
        if mine != theirs:
            raise UserError(
                f"the negatives in {path.parent} were made with another {word} ({theirs}, now {mine}): {_AGAIN}"
            )
    if found != wanted:
        raise UserError(f"{path} holds other windows than it should: {_AGAIN}")


def _read(path: Path, per_prefix: int) -> pa.Table:
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None
    if table.schema.names != SCHEMA.names or table.num_rows % per_prefix:
        raise _damaged(path, "it has other columns or rows")
    return table


def _damaged(path: Path, why: object) -> UserError:
    return UserError(
        f"{path} is damaged ({(str(why).splitlines() or [''])[0]}): delete it and run the negatives stage again"
    )


def _padded(column: pa.ChunkedArray, shape: tuple[int, int], width: int) -> tuple[Tensor, Tensor]:
    """Lists of tokens as one array, padded on the right."""
    lists = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    lengths = torch.from_numpy(lists.value_lengths().to_numpy().astype(np.int64)).view(shape)
    tokens = torch.zeros(*shape, width, dtype=torch.int32)
    tokens[torch.arange(width) < lengths.unsqueeze(-1)] = torch.from_numpy(lists.flatten().to_numpy().copy())
    return tokens, lengths
