"""Windows: a prefix of p tokens and the continuation that follows it, inside one document.

    start = k·s,   prefix = [start, start + p),   continuation = [start + p, start + p + ℓ)

``ending = "fixed"``: ℓ = L and EOS is left out. ``ending = "eos"``: the document's EOS belongs to it, ℓ = L or less
where EOS comes before. On disk they are one array of records, which is written part by part and mapped, not loaded.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Integer

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error, intact
from freenergy.corpus.settings import CorpusSettings

RECORD = np.dtype([("start", "<i8"), ("document", "<i8"), ("length", "<i4")])
_DOCUMENTS = 1 << 16  # per batch
_PART = 1 << 18  # maximum windows per part

Places = np.ndarray  # of RECORD


def make_windows(
    documents: Integer[np.ndarray, " bounds"], settings: CorpusSettings, split: str, part: int = _PART
) -> Iterator[Places]:
    """Yield all windows in the order of the stream, in parts; document d is [documents[d], documents[d + 1])."""
    p, L, s = settings.prefix, settings.continuation, settings.step
    least, found = L if settings.ending == "fixed" else 1, 0
    for first in range(0, len(documents) - 1, _DOCUMENTS):
        bounds = documents[first : first + _DOCUMENTS + 1].astype(np.int64)
        n = np.diff(bounds) - (settings.ending == "fixed")
        counts = np.maximum((n - p - least) // s + 1, 0)
        ends = np.cumsum(counts)
        found += int(ends[-1])
        for begin in range(0, int(ends[-1]), part):
            window = np.arange(begin, min(begin + part, int(ends[-1])))
            document = np.searchsorted(ends, window, side="right")
            skipped = (window - ends[document] + counts[document]) * s
            yield places_of(bounds[document] + skipped, np.minimum(L, n[document] - skipped - p), first + document)
    if not found:
        raise _too_short(documents, settings, split)


def places_of(
    starts: Integer[np.ndarray, " W"],
    lengths: Integer[np.ndarray, " W"] | int,
    documents: Integer[np.ndarray, " W"] | int = 0,
) -> Places:
    """Return the windows with these starts and continuation lengths."""
    places = np.empty(len(starts), dtype=RECORD)
    places["start"], places["length"], places["document"] = starts, lengths, documents
    return places


def _too_short(documents: np.ndarray, settings: CorpusSettings, split: str) -> UserError:
    longest = int(np.diff(documents).max(initial=1)) - 1
    need = settings.prefix + (settings.continuation if settings.ending == "fixed" else 0)
    parts = "prefix + continuation" if settings.ending == "fixed" else "the prefix"
    return UserError(
        f"no {split} document is long enough for {parts} = {need} tokens (the longest has {longest}): reduce prefix "
        "and continuation, or make documents longer (documents, document_start)"
    )


def write_windows(path: Path, parts: Iterable[Places]) -> Places:
    """Store windows as a .npy file; returns them memory-mapped."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        count = 0
        _write_header(file, count)
        for part in parts:
            file.write(part.tobytes())  # numpy's own file writer does not report a full disk
            count += len(part)
        file.seek(0)
        _write_header(file, count)
    return read_windows(path)


def _write_header(file: BinaryIO, count: int) -> None:
    """Write a header of constant length: numpy pads it for any count."""
    about = np.lib.format.header_data_from_array_1_0(np.empty(0, dtype=RECORD))
    np.lib.format.write_array_header_1_0(file, about | {"shape": (count,)})


def read_windows(path: Path) -> Places:
    """Load the windows that ``write_windows`` stored, memory-mapped."""
    with corruption_as_user_error(path, "run the corpus stage again"):
        places: Places = np.load(intact(path), mmap_mode="r", allow_pickle=False)
        if places.dtype != RECORD or places.ndim != 1:
            raise ValueError("not the windows of a corpus")
    return places
