"""Windows: a prefix of p tokens and the continuation that follows it, inside one document.

    start = k·s,   prefix = [start, start + p),   continuation = [start + p, start + p + ℓ)

``ending = "fixed"``: ℓ = L and EOS is left out. ``ending = "eos"``: the document's EOS belongs to it, ℓ = L or less
where EOS comes before. No window reaches into another document.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Integer

from freenergy.corpus.settings import CorpusSettings
from freenergy.errors import UserError
from freenergy.storage import whole

SCHEMA = pa.schema([("start", pa.int64()), ("length", pa.int32()), ("document", pa.int64())])
_DOCUMENTS = 1 << 16  # handled at a time

Places = dict[str, np.ndarray]


def make_windows(documents: Integer[np.ndarray, " bounds"], settings: CorpusSettings, split: str) -> Places:
    """Start, continuation length and document of every window, in the order of the stream.

    ``documents`` are the bounds of the documents in the stream: document d is [documents[d], documents[d + 1]), its
    EOS included.
    """
    parts = list(_parts(documents, settings))
    places = {name: np.concatenate([part[name] for part in parts]) for name in SCHEMA.names} if parts else {}
    if not parts or not len(places["start"]):
        raise _too_short(documents, settings, split)
    return places


def _parts(documents: np.ndarray, settings: CorpusSettings) -> Iterator[Places]:
    p, L, s = settings.prefix, settings.continuation, settings.step
    least = L if settings.ending == "fixed" else 1
    for first in range(0, len(documents) - 1, _DOCUMENTS):
        bounds = documents[first : first + _DOCUMENTS + 1].astype(np.int64)
        n = np.diff(bounds) - (settings.ending == "fixed")
        counts = np.maximum((n - p - least) // s + 1, 0)
        document = np.repeat(np.arange(len(n)), counts)
        k = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        yield {
            "start": bounds[document] + k * s,
            "length": np.minimum(L, n[document] - k * s - p).astype(np.int32),
            "document": first + document,
        }


def _too_short(documents: np.ndarray, settings: CorpusSettings, split: str) -> UserError:
    longest = int(np.diff(documents).max(initial=1)) - 1
    need = settings.prefix + (settings.continuation if settings.ending == "fixed" else 0)
    parts = "prefix + continuation" if settings.ending == "fixed" else "the prefix"
    return UserError(
        f"no {split} document is long enough for {parts} = {need} tokens (the longest has {longest}): set prefix and "
        "continuation to less, or have longer documents (documents, document_start)"
    )


def write_windows(path: Path, places: Places, settings: CorpusSettings) -> None:
    """Store windows as Parquet; the schema's metadata says how they were cut."""
    about = {"prefix": settings.prefix, "continuation": settings.continuation, "ending": settings.ending}
    schema = SCHEMA.with_metadata({key: str(value) for key, value in about.items()})
    table = pa.table([places[name] for name in SCHEMA.names], schema=schema)
    with whole(path) as aside:
        pq.write_table(table, aside, compression="zstd")


def read_windows(path: Path) -> Places:
    """The windows that ``write_windows`` stored."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): run the corpus stage again") from None
    if not table.schema.equals(SCHEMA) or any(column.null_count for column in table.columns):
        raise UserError(f"{path} does not hold windows of a corpus: run the corpus stage again")
    return {name: table.column(name).to_numpy() for name in SCHEMA.names}
