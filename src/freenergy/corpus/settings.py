"""What the corpus stage can be told: which text, how it is cut, and into which tokens.

    document = c_1 … c_n,   window k = (prefix, continuation) = (c[k·s : k·s + p], c[k·s + p : k·s + p + L])

with p = ``prefix``, L = ``continuation`` and s = ``stride``; s = L makes the continuations of a document disjoint.
"""

import re
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.errors import UserError

SPLITS = ("train", "validation", "test")
LONGEST = 1_000_000  # tokens of a window's part: beyond every model, and within every integer type
_BYTES_AND_EOS = 257
_MOST_TOKENS = 2**24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Which text, and how documents, splits and windows are made of it.

    Either ``source`` is split by document into shares, or ``train`` and ``validation`` (and ``test``) name the splits.
    A ``.txt`` is one document, or one document a line or paragraph, or a document begins at each line that matches
    ``document_start``; a row of a table is always one document. ``ending`` says where a continuation stops: "fixed"
    after L tokens, "eos" at the end of the document or after L tokens, whichever comes first. Held-out windows that
    share ``deduplicate`` tokens in a row with earlier splits are dropped (0 keeps them all). Where a named text cannot
    be fetched, ``fallback`` may be the docstrings of the installed packages.
    """

    source: str = ""
    train: str = ""
    validation: str = ""
    test: str = ""
    text_column: str = "text"
    documents: Literal["file", "line", "paragraph"] = "file"
    document_start: str | None = None
    validation_share: float = 0.05
    test_share: float = 0.05
    prefix: int = 120
    continuation: int = 40
    stride: int | None = None
    ending: Literal["fixed", "eos"] = "fixed"
    deduplicate: int = 24
    fallback: Literal["", "docstrings"] = ""

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_shares()
        self._check_windows()
        self._check_documents()

    @property
    def step(self) -> int:
        """Tokens from one window of a document to the next."""
        return self.continuation if self.stride is None else self.stride

    @property
    def ngram(self) -> int:
        """Length of the n-grams that held-out windows may not share; at most a whole window, 0 when off."""
        return min(self.deduplicate, self.prefix + self.continuation)

    def _check_sources(self) -> None:
        named = [name for name in SPLITS if getattr(self, name)]
        if self.source and named:
            raise UserError(
                f"corpus.source and corpus.{named[0]} are both set: give source alone to have it split, or leave it out"
            )
        if not self.source and not (self.train and self.validation):
            raise UserError("the corpus names no text: set corpus.source, or corpus.train and corpus.validation")

    def _check_shares(self) -> None:
        for name, share in (("validation_share", self.validation_share), ("test_share", self.test_share)):
            if not 0 <= share < 1:
                raise UserError(f"corpus.{name} is {share}: set it to at least 0 and below 1")
        if self.source and self.validation_share == 0:
            raise UserError("corpus.validation_share is 0, so nothing can be measured: set it above 0, such as 0.05")
        if self.validation_share + self.test_share >= 1:
            raise UserError(
                f"corpus.validation_share + test_share is {self.validation_share + self.test_share:g}, which leaves no "
                "text to train on: set their sum below 1"
            )

    def _check_windows(self) -> None:
        lowest = {"prefix": 0, "continuation": 1, "deduplicate": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise UserError(f"corpus.{name} is {getattr(self, name)}: set it to {least} or more")
            if getattr(self, name) > LONGEST:
                raise UserError(f"corpus.{name} is {getattr(self, name)}: set it to {LONGEST} or less")
        if self.stride is not None and not 1 <= self.stride <= LONGEST:
            raise UserError(f"corpus.stride is {self.stride}: set it to 1 or more, or leave it out")

    def _check_documents(self) -> None:
        if not self.text_column:
            raise UserError("corpus.text_column is empty: set it to the name of the column that holds the text")
        if self.document_start is None:
            return
        if self.documents != "file":
            raise UserError(
                f'corpus.document_start and documents = "{self.documents}" both say where a document begins: '
                "leave one of them out"
            )
        try:
            re.compile(self.document_start)
        except re.error as error:
            raise UserError(
                f"corpus.document_start {self.document_start!r} is not a regular expression ({error}): "
                "mend it, or escape the characters that are meant literally with a backslash"
            ) from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BytePairTokenizer:
    """Byte-level byte-pair encoding, learned from the training split (at most ``sample_megabytes`` of it)."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = 8192
    sample_megabytes: int = 64

    def __post_init__(self) -> None:
        if not _BYTES_AND_EOS <= self.vocab_size <= _MOST_TOKENS:
            raise UserError(
                f"tokenizer.vocab_size is {self.vocab_size}: set it to {_BYTES_AND_EOS} or more "
                f"(256 bytes and the end of a document), and at most {_MOST_TOKENS}"
            )
        if self.sample_megabytes < 1:
            raise UserError(f"tokenizer.sample_megabytes is {self.sample_megabytes}: set it to 1 or more")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WordTokenizer:
    """Words between white space, the most frequent of the training split; all of them when ``vocab_size`` is None."""

    kind: Literal["words"] = "words"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.vocab_size is not None and not 3 <= self.vocab_size <= _MOST_TOKENS:
            raise UserError(
                f"tokenizer.vocab_size is {self.vocab_size}: set it to 3 or more (a word, <unk> and the end of a "
                "document), or leave it out to keep every word"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedTokenizer:
    """The tokenizer of a model on disk: a folder in Hugging Face form, or a GGUF file."""

    kind: Literal["pretrained"] = "pretrained"
    path: str

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("tokenizer.path is empty: set it to the folder of the model, or to its .gguf file")


TokenizerSettings = BytePairTokenizer | WordTokenizer | PretrainedTokenizer
