"""Assigns documents to splits.

    h(d) = keyed hash of the document's text,      validation: h < a,      test: a ≤ h < b,      train: b ≤ h

a and b are quantiles of the distinct hashes, so that each split gets its share of the documents and at least one.
Equal documents have equal hashes: none is in two splits. Of a document that comes in pieces the first piece is hashed.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import final

import numpy as np

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance, Progress
from freenergy.corpus.documents import DocumentPiece
from freenergy.corpus.read import read, size
from freenergy.corpus.settings import SPLITS, CorpusSettings

Sources = Mapping[str, Sequence[Path]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one reading of all the text found, before anything is encoded."""

    documents: dict[str, int]  # of each source
    characters: dict[str, int]
    bounds: Sequence[int]  # a and b, where one source is split


def survey(settings: CorpusSettings, sources: Sources, seed: int, progress: Progress) -> Survey:
    """Read everything once: find bad files early, count, and set the bounds of the splits."""
    documents, characters = dict.fromkeys(sources, 0), dict.fromkeys(sources, 0)
    hashes = array("Q")
    with progress.track("reading the text", total_size(sources), "bytes") as advance:
        for name, paths in sources.items():
            for piece in read(paths, settings, advance):
                documents[name] += piece.is_first
                characters[name] += len(piece.text)
                if piece.is_first and name == "all":
                    hashes.append(_hash(piece.text, seed))
    _check_documents(documents, sources)
    bounds = _bounds(np.frombuffer(hashes, dtype=np.uint64), settings) if "all" in sources else (0, 0)
    return Survey(documents=documents, characters=characters, bounds=bounds)


def tagged(
    settings: CorpusSettings, sources: Sources, found: Survey, seed: int, advance: Advance
) -> Iterator[tuple[str, DocumentPiece]]:
    """Yield all pieces in the order of the sources, each with its split."""
    for name, paths in sources.items():
        split = name
        for piece in read(paths, settings, advance):
            if name == "all" and piece.is_first:
                value, (a, b) = _hash(piece.text, seed), found.bounds
                split = "validation" if value < a else "test" if value < b else "train"
            yield split, piece


def wanted(settings: CorpusSettings, sources: Sources) -> tuple[str, ...]:
    """Return the names of the splits."""
    if "all" in sources:
        return SPLITS if settings.test_share > 0 else SPLITS[:2]
    return tuple(name for name in SPLITS if name in sources)


def total_size(sources: Sources) -> int:
    """Return the bytes on disk of all sources, for progress reports."""
    return size([path for paths in sources.values() for path in paths])


def _hash(text: str, seed: int) -> int:
    key = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "little")


def _bounds(hashes: np.ndarray, settings: CorpusSettings) -> tuple[int, int]:
    distinct = np.unique(hashes)
    shares = settings.validation_share, settings.test_share
    validation, test = (max(1, round(share * len(distinct))) if share > 0 else 0 for share in shares)
    if validation + test >= len(distinct):
        raise UserError(
            f"the corpus has {len(distinct)} distinct document{'s' * (len(distinct) != 1)}, too few to split: set "
            'documents = "paragraph" or "line", or document_start, or give the splits in files of their own '
            "(train, validation, test)"
        )
    return int(distinct[validation]), int(distinct[validation + test])


def _check_documents(documents: Mapping[str, int], sources: Sources) -> None:
    for name, count in documents.items():
        if count == 0:
            where = ", ".join(map(str, sources[name][:3])) or "no file"
            raise UserError(f"{where} contains no text: give a corpus with at least one non-blank document")
