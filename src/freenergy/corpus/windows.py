"""Windows: a prefix of p tokens and the continuation that follows it, inside one document.

    start = k·s,   prefix = [start, start + p),   continuation = [start + p, start + p + ℓ)

``ending = "fixed"``: ℓ = L and EOS is left out. ``ending = "eos"``: the document's EOS belongs to it, ℓ = L or less
where EOS comes before. No window reaches into another document.

On disk they are one array of records, which is mapped and not loaded: windows are many.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from freenergy.corpus.settings import CorpusSettings
from freenergy.corpus.shards import write_array
from freenergy.errors import UserError
from freenergy.storage import undamaged

RECORD = np.dtype([("start", "<i8"), ("document", "<i8"), ("length", "<i4")])
_DOCUMENTS = 1 << 16  # handled at a time

Places = np.ndarray  # of RECORD


def make_windows(documents: Integer[np.ndarray, " bounds"], settings: CorpusSettings, split: str) -> Places:
    """Start, continuation length and document of every window, in the order of the stream.

    ``documents`` are the bounds of the documents in the stream: document d is [documents[d], documents[d + 1]), its
    EOS included.
    """
    parts = list(_parts(documents, settings))
    if not sum(map(len, parts)):
        raise _too_short(documents, settings, split)
    return np.concatenate(parts)


def _parts(documents: np.ndarray, settings: CorpusSettings) -> Iterator[Places]:
    p, L, s = settings.prefix, settings.continuation, settings.step
    least = L if settings.ending == "fixed" else 1
    for first in range(0, len(documents) - 1, _DOCUMENTS):
        bounds = documents[first : first + _DOCUMENTS + 1].astype(np.int64)
        n = np.diff(bounds) - (settings.ending == "fixed")
        counts = np.maximum((n - p - least) // s + 1, 0)
        document = np.repeat(np.arange(len(n)), counts)
        k = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        yield places_of(bounds[document] + k * s, np.minimum(L, n[document] - k * s - p), first + document)


def places_of(
    starts: Integer[np.ndarray, " W"],
    lengths: Integer[np.ndarray, " W"] | int,
    documents: Integer[np.ndarray, " W"] | int = 0,
) -> Places:
    """Windows that begin there, with continuations of these lengths."""
    places = np.empty(len(starts), dtype=RECORD)
    places["start"], places["length"], places["document"] = starts, lengths, documents
    return places


def _too_short(documents: np.ndarray, settings: CorpusSettings, split: str) -> UserError:
    longest = int(np.diff(documents).max(initial=1)) - 1
    need = settings.prefix + (settings.continuation if settings.ending == "fixed" else 0)
    parts = "prefix + continuation" if settings.ending == "fixed" else "the prefix"
    return UserError(
        f"no {split} document is long enough for {parts} = {need} tokens (the longest has {longest}): set prefix and "
        "continuation to less, or have longer documents (documents, document_start)"
    )


def write_windows(path: Path, places: Places) -> None:
    """Store windows as a file of numpy."""
    write_array(path, places)


def read_windows(path: Path) -> Places:
    """The windows that ``write_windows`` stored, mapped."""
    with undamaged(path, "run the corpus stage again"):
        places: Places = np.load(path, mmap_mode="r", allow_pickle=False)
        if places.dtype != RECORD or places.ndim != 1:
            raise ValueError("it holds no windows of a corpus")
    return places
