"""Shards of negatives as Parquet files: written whole, and read back only if they are what they should be."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, intact
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations

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
_WORDS = {
    "lm": "language model",
    "per_prefix": "number of negatives per prefix",
    "sources": "mixture of sources",
    "space": "space of continuations",
}  # the other fields are called by their names


def shard_path(folder: Path, k: int) -> Path:
    """Return where shard k of a store is."""
    return folder / f"shard-{k:05d}.parquet"


def write_shard(path: Path, rows: Tensor, draws: Draws, labels: list[str], about: dict[str, Any]) -> None:
    """Write the draws of some windows with what made them."""
    K = len(labels)
    columns = [
        rows.repeat_interleave(K).numpy(),
        np.tile(np.arange(K, dtype=np.int32), len(rows)),
        _lists(draws.x),
        draws.log_base.double().flatten().cpu().numpy(),
        draws.log_proposal.double().flatten().cpu().numpy(),
        labels * len(rows),
    ]
    schema = SCHEMA.with_metadata({_KEY: json.dumps(about, sort_keys=True)})
    with atomic_write(path) as aside:
        pq.write_table(pa.table(columns, schema=schema), aside, compression="zstd", write_page_checksum=True)


def _lists(x: Continuations) -> pa.ListArray:
    """The continuations one after the other, as Arrow holds them: no number becomes a Python object."""
    ends = x.lengths.flatten().cumsum(0).cpu().numpy()
    tokens = x.tokens[x.mask].cpu().numpy()
    return pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), tokens.astype(np.int32))


def read_about(path: Path) -> dict[str, Any]:
    """What a shard says of itself."""
    if not path.is_file():
        raise _missing(path)
    try:
        about: dict[str, Any] = json.loads((pq.read_schema(intact(path)).metadata or {})[_KEY])
    except UserError:
        raise
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise damaged(path, error) from None
    if set(about) != {"identity", "rows", "shard", "shards"}:
        raise damaged(path, "it does not say what made it")
    return about


def check_about(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a shard that was made of other things."""
    for key, mine in wanted["identity"].items():
        theirs, word = found["identity"].get(key), _WORDS.get(key, key)
        if mine != theirs:
            raise UserError(
                f"the negatives in {path.parent} were made with another {word} ({theirs}, now {mine}): {_AGAIN}"
            )
    if found != wanted:
        raise UserError(f"{path} holds other windows than it should: {_AGAIN}")


def size_of(path: Path) -> int:
    """Return the bytes of a shard, or say that it is missing."""
    if not path.is_file():
        raise _missing(path)
    return path.stat().st_size


def _missing(path: Path) -> UserError:
    return UserError(f"there is no file {path}: run the negatives stage, which draws what is missing")


def read_tables(folder: Path, first: dict[str, Any]) -> Iterator[pa.Table]:
    """Reads the shards one by one, and checks that each is complete and was made like the first."""
    for k in range(first["shards"]):
        path = shard_path(folder, k)
        check_about(path, read_about(path), {**first, "shard": k})
        yield _read(path, first["identity"])


def _read(path: Path, identity: dict[str, Any]) -> pa.Table:
    try:
        table = pq.read_table(intact(path), page_checksum_verification=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise damaged(path, error) from None
    if not table.schema.equals(SCHEMA) or table.num_rows % identity["per_prefix"]:
        raise damaged(path, "it has other columns or rows")
    if any(column.null_count for column in (*table.columns, pc.list_flatten(table.column("tokens")))):
        raise damaged(path, "it has empty places")
    lengths = pc.list_value_length(table.column("tokens"))
    if (pc.max(lengths).as_py() or 0) > identity["space"]["length"]:
        raise damaged(path, "it has longer continuations than it should")
    return table


def damaged(path: Path, why: object) -> UserError:
    """Return the sentence on a shard that cannot be read."""
    return UserError(
        f"{path} is damaged ({(str(why).splitlines() or [''])[0]}): delete it and run the negatives stage again"
    )
