"""Settings of the corpus stage: which text, how it is cut into windows, and which tokenizer.

    document = c_1 … c_n,   window k = (prefix, continuation) = (c[k·s : k·s + p], c[k·s + p : k·s + p + L])

with p = ``prefix``, L = ``continuation`` and s = ``stride``; s = L makes the continuations of a document disjoint.
"""

import re
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError

SPLITS = ("train", "validation", "test")
MAX_LENGTH = 1_000_000  # tokens of a prefix or continuation: beyond every model, and within every integer type
_MIN_BPE = 257
_MAX_VOCAB_SIZE = 2**24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """Which text to use, and how to make documents, splits and windows from it.

    Either ``source`` is split by document into shares, or ``train`` and ``validation`` (and ``test``) name the splits.
    A ``.txt`` is one document, or one document per line or paragraph, or a document starts at each line that matches
    ``document_start``; a row of a table is always one document. ``ending`` says where a continuation stops: "fixed"
    after L tokens, "eos" at the end of the document or after L tokens, whichever comes first. Held-out windows that
    share an n-gram of ``deduplicate`` tokens with earlier splits are dropped (0 keeps them all). If a named text cannot
    be downloaded, ``fallback`` may select the docstrings of the installed packages instead.
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
        check_range(self, "prefix", "deduplicate", at_least=0, at_most=MAX_LENGTH, section="corpus.")
        check_range(self, "continuation", "stride", at_least=1, at_most=MAX_LENGTH, section="corpus.")
        self._check_documents()

    @property
    def step(self) -> int:
        """The distance in tokens from one window of a document to the next."""
        return self.continuation if self.stride is None else self.stride

    @property
    def ngram(self) -> int:
        """The length of the n-grams that held-out windows may not share: at most a whole window, 0 if off."""
        return min(self.deduplicate, self.prefix + self.continuation)

    def _check_sources(self) -> None:
        named = [name for name in SPLITS if getattr(self, name)]
        if self.source and named:
            raise UserError(
                f"corpus.source and corpus.{named[0]} are both set: set source alone to have it split, or leave it out"
            )
        if not self.source and not (self.train and self.validation):
            raise UserError("no text is configured: set corpus.source, or corpus.train and corpus.validation")

    def _check_shares(self) -> None:
        check_range(self, "validation_share", "test_share", at_least=0, below=1, section="corpus.")
        if self.source and self.validation_share == 0:
            raise UserError("corpus.validation_share is 0, so nothing can be measured: set it above 0, such as 0.05")
        if self.validation_share + self.test_share >= 1:
            raise UserError(
                f"corpus.validation_share + test_share is {self.validation_share + self.test_share:g}, which leaves no "
                "text to train on: set their sum below 1"
            )

    def _check_documents(self) -> None:
        if not self.text_column:
            raise UserError("corpus.text_column is empty: set it to the name of the column that contains the text")
        if self.document_start is None:
            return
        if self.documents != "file":
            raise UserError(
                f'corpus.document_start and documents = "{self.documents}" both define where a document starts: '
                "leave one of them out"
            )
        try:
            re.compile(self.document_start)
        except re.error as error:
            raise UserError(
                f"corpus.document_start {self.document_start!r} is not a regular expression ({error}): "
                "fix it, or escape literal characters with a backslash"
            ) from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BytePairTokenizer:
    """Byte-level byte-pair encoding, trained on the training split (on at most ``sample_megabytes`` of it)."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = 8192
    sample_megabytes: int = 64

    def __post_init__(self) -> None:
        hint = " (it includes 256 bytes and end-of-text)"
        check_range(self, "vocab_size", at_least=_MIN_BPE, at_most=_MAX_VOCAB_SIZE, section="tokenizer.", hint=hint)
        check_range(self, "sample_megabytes", at_least=1, section="tokenizer.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WordTokenizer:
    """Splits at white space and keeps the most frequent words of the training split; all if ``vocab_size`` is None."""

    kind: Literal["words"] = "words"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        hint = " (it includes <unk> and end-of-text), or leave it out to keep every word"
        check_range(self, "vocab_size", at_least=3, at_most=_MAX_VOCAB_SIZE, section="tokenizer.", hint=hint)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedTokenizer:
    """Loads the tokenizer of a model on disk: a folder in Hugging Face format, or a GGUF file."""

    kind: Literal["pretrained"] = "pretrained"
    path: str

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("tokenizer.path is empty: set it to the folder of the model, or to its .gguf file")


TokenizerSettings = BytePairTokenizer | WordTokenizer | PretrainedTokenizer
