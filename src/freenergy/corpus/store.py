"""Reads a prepared corpus from disk.

    <split>.bin  tokens,   <split>.documents.npy  bounds,   <split>.windows.npy  windows,  tokenizer/,  corpus.json

Streams and windows are mapped, not loaded; windows become tensors on access.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, fingerprint, intact, read_json
from freenergy.core.roles import Examples
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.corpus.chunks import Chunks
from freenergy.corpus.settings import SPLITS
from freenergy.corpus.shards import token_type
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.corpus.windows import Places, read_windows

REPORT = "corpus.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """The size of one split."""

    documents: int
    tokens: int  # with the EOS of each document
    bytes: int  # of the text
    windows: int  # kept
    windows_dropped: int = 0
    ngrams_shared: float | None = None  # share of the n-grams that occur in earlier splits, if computed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A window as text."""

    prefix: str
    continuation: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """The metadata of a corpus; ``fingerprint`` identifies its content."""

    fingerprint: str
    tokenizer: str
    vocab_size: int
    eos: int
    prefix: int
    continuation: int
    ending: str
    ngram: int
    splits: dict[str, SplitReport]
    examples: tuple[Example, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CorpusReport":
        """Return the inverse of ``dataclasses.asdict``."""
        splits = {name: SplitReport(**value["splits"][name]) for name in SPLITS if name in value["splits"]}
        examples = tuple(Example(**example) for example in value["examples"])
        return cls(**{**value, "splits": splits, "examples": examples})


@final
class Windows:
    """The windows of one split: p tokens of prefix and up to L of continuation each; or those windows in chunks."""

    def __init__(
        self,
        stream: Any,
        places: Places,
        prefix: int,
        continuation: int,
        chunks: tuple[int, ...] = (),
        vocab_size: int | None = None,
    ) -> None:
        self._stream, self._places, self._prefix, self._continuation = stream, places, prefix, continuation
        self._vocab_size = vocab_size  # None: token ids are not checked
        self.chunks = Chunks(places["length"], continuation, chunks) if chunks else None

    def __len__(self) -> int:
        return len(self._places) if self.chunks is None else len(self.chunks)

    @property
    def starts(self) -> Integer[np.ndarray, " W"]:
        """Where in the stream the prefix of each window begins."""
        return self._of_windows("start")

    @property
    def documents(self) -> Integer[np.ndarray, " W"]:
        """The document that each window is in."""
        return self._of_windows("document")

    def _of_windows(self, name: str) -> np.ndarray:
        found: np.ndarray = self._places[name]
        return found if self.chunks is None else found[self.chunks.at(np.arange(len(self))).window]

    def in_chunks(self, sizes: tuple[int, ...]) -> "Windows":
        """Return the same windows chunk by chunk, with chunks of each of these sizes."""
        return Windows(self._stream, self._places, self._prefix, self._continuation, sizes, self._vocab_size)

    @property
    def num_whole(self) -> int:
        """The number of whole windows."""
        return len(self._places)

    def rows_of(self, whole: Int[Tensor, " some"]) -> Int[Tensor, " rows"]:
        """Return the numbers of all chunks of some whole windows, in the order of the text."""
        return whole if self.chunks is None else torch.from_numpy(self.chunks.of_windows(whole.numpy()))

    def are_first(self, rows: Integer[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        """Return which of these are the first chunk of their whole window."""
        return np.full(len(rows), True) if self.chunks is None else self.chunks.at(rows).skipped == 0

    def whole_of(self, rows: Integer[np.ndarray, " rows"]) -> Integer[np.ndarray, " whole"]:
        """Return the numbers of the whole windows that ``rows_of`` gave these rows for."""
        return rows if self.chunks is None else self.chunks.at(rows[self.are_first(rows)]).window

    def examples(self, rows: Int[Tensor, " B"]) -> Examples:
        """Return some windows with their numbers and the maximum lengths of their continuations."""
        rooms = None if self.chunks is None else torch.from_numpy(self.chunks.at(rows.numpy()).room)
        return Examples(self.continuations(rows), rows, rooms)

    def continuations(self, rows: slice | Sequence[int] | Tensor | np.ndarray) -> Continuations:
        """Return some windows: B prefixes as contexts with one continuation each, padded on the right to L."""
        at = rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
        if isinstance(at, np.ndarray) and at.size and not 0 <= at.min() <= at.max() < len(self):
            raise UserError(
                f"window {at.max()} does not exist, there are {len(self)}: files of the run are damaged or do not "
                "match; delete the stage that refers to that window and run it again"
            )
        if self.chunks is not None:
            return self._chunk_windows(np.arange(len(self))[at] if isinstance(at, slice) else at, self.chunks)
        starts, lengths = self._places["start"][at], torch.from_numpy(self._places["length"][at].astype(np.int64))
        p, L = self._prefix, self._continuation
        tokens = self._read(starts, p + L)
        x = tokens[:, p:] * (torch.arange(L) < lengths.unsqueeze(-1))
        contexts = Sequences(tokens[:, :p].contiguous(), torch.full((len(starts),), p))
        return Continuations(contexts, x.unsqueeze(1), lengths.unsqueeze(1))

    def _chunk_windows(self, rows: Integer[np.ndarray, " B"], chunks: Chunks) -> Continuations:
        """Return chunk windows, whose contexts have several lengths."""
        place = chunks.at(rows)
        start, whole = self._places["start"][place.window], self._places["length"][place.window]
        p = torch.from_numpy(place.skipped + self._prefix)
        lengths = torch.from_numpy(np.minimum(place.size, whole - place.skipped))
        longest, m = int(p.max()) if len(p) else 0, int(chunks.sizes.max())
        before, x = self._read(start, longest), self._read(start + p.numpy(), m)
        contexts = Sequences(before * (torch.arange(longest) < p.unsqueeze(-1)), p)
        x = x * (torch.arange(m) < lengths.unsqueeze(-1))
        return Continuations(contexts, x.unsqueeze(1), lengths.unsqueeze(1))

    def _read(self, starts: Integer[np.ndarray, " B"], length: int) -> Int[Tensor, "B length"]:
        """Return ``length`` tokens from each place; the end of the stream is not read beyond."""
        place = np.minimum(starts[:, None] + np.arange(length), len(self._stream) - 1)
        tokens = self._stream[place].astype(np.int64)
        if self._vocab_size is not None and tokens.size and tokens.max() >= self._vocab_size:
            raise UserError(
                f"a token of the corpus is {tokens.max()}, not below {self._vocab_size}: its files are damaged, so run "
                "the corpus stage again"
            )
        return torch.from_numpy(tokens)


@final
class Corpus:
    """Streams and windows of the splits, and the tokenizer that made them."""

    def __init__(self, folder: Path, report: CorpusReport, tokenizer: Tokenizer, chunks: tuple[int, ...] = ()) -> None:
        self.folder, self.report, self.tokenizer = folder, report, tokenizer
        self.chunks = chunks  # lengths of the chunks that windows are read in; none: whole windows
        self.prefix, self.continuation = report.prefix, report.continuation  # p and L, in tokens
        self.ending = report.ending  # where a continuation stops: "fixed" or "eos"
        # equal for two corpora of the same tokens and windows
        self.fingerprint = fingerprint([report.fingerprint, chunks]) if chunks else report.fingerprint

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Load a prepared corpus; raises ``UserError`` if something is missing or damaged."""
        folder = Path(folder)
        if not (folder / REPORT).is_file():
            raise UserError(f"there is no prepared corpus in {folder}: run the corpus stage first")
        with corruption_as_user_error(folder / REPORT, "run the corpus stage again"):
            report = CorpusReport.from_json(read_json(folder / REPORT))
        tokenizer = Tokenizer.from_pretrained(folder / "tokenizer")
        if tokenizer.fingerprint != report.tokenizer:
            raise UserError(f"the tokenizer in {folder} is not the one that made the corpus: run its stage again")
        return cls(folder, report, tokenizer)

    def in_chunks(self, sizes: tuple[int, ...]) -> "Corpus":
        """Return the same corpus, whose windows are chunk windows of these lengths; none: whole windows."""
        return Corpus(self.folder, self.report, self.tokenizer, sizes)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self.report.splits)

    @property
    def space(self) -> SequenceSpace:
        """The set of continuations that the windows are drawn from; of chunk windows the longest of them."""
        eos = self.tokenizer.eos if self.ending == "eos" else None
        length = max(self.chunks, default=self.continuation)
        return SequenceSpace(vocab_size=self.tokenizer.vocab_size, length=length, eos=eos)

    def stream(self, split: str) -> np.memmap:
        """Return all tokens of a split, each document followed by EOS, mapped from disk."""
        path, kind = self._path(split, "bin"), token_type(self.report.vocab_size)
        expected = self.report.splits[split].tokens * kind.itemsize
        if path.stat().st_size != expected:
            raise _damaged(path, f"{path.stat().st_size} bytes, not {expected}")
        return np.memmap(intact(path), dtype=kind, mode="r")

    def documents(self, split: str) -> np.ndarray:
        """Bounds of the documents in the stream: document d is [bounds[d], bounds[d + 1]), its EOS included."""
        path = self._path(split, "documents.npy")
        with corruption_as_user_error(path, "run the corpus stage again"):
            bounds: np.ndarray = np.load(intact(path), mmap_mode="r", allow_pickle=False)
        if len(bounds) != self.report.splits[split].documents + 1:
            raise _damaged(path, f"{len(bounds) - 1} documents, not {self.report.splits[split].documents}")
        return bounds

    def windows(self, split: str) -> Windows:
        """Return the windows of a split."""
        path = self._path(split, "windows.npy")
        places = read_windows(path)
        if len(places) != self.report.splits[split].windows:
            raise _damaged(path, f"{len(places)} windows, not {self.report.splits[split].windows}")
        stream = self.stream(split)
        self._check_places(path, places, len(stream), self.report.splits[split].documents)
        return Windows(stream, places, self.prefix, self.continuation, self.chunks, self.report.vocab_size)

    def _check_places(self, path: Path, places: Places, tokens: int, documents: int) -> None:
        """Refuse windows that do not lie in the stream, which would be read as other texts."""
        if not len(places):
            return
        start, length, document = places["start"], places["length"], places["document"]
        if not (length.min() >= 1 and length.max() <= self.continuation):
            raise _damaged(path, f"a continuation has {length.min()} or {length.max()} tokens")
        if not (start.min() >= 0 and (start + self.prefix + length).max() <= tokens):
            raise _damaged(path, f"a window lies outside of the {tokens} tokens of its split")
        if not (document.min() >= 0 and document.max() < documents):
            raise _damaged(path, f"a window names a document beyond {documents}")

    def _path(self, split: str, ending: str) -> Path:
        if split not in self.report.splits:
            raise UserError(f"the corpus in {self.folder} has no split {split!r}: it has {', '.join(self.splits)}")
        path = self.folder / f"{split}.{ending}"
        if not path.is_file():
            raise UserError(f"there is no file {path}: run the corpus stage again")
        return path


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}): run the corpus stage again")
