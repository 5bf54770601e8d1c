"""From the tokens of the corpus, through text, to the tokens of an encoder.

    (c, x)  →  bytes  →  text of c, text of x  →  [CLS] tokens of c + x [SEP]     with a mark at every token

What the encoder reads depends on the two texts alone, never on how they were cut into tokens. Together, prefix and
continuation are encoded as one text, so that a word across the boundary is one word; a token that covers any character
of x belongs to x. Apart (for a prefix that is read once), the two texts are encoded each on its own, so that the tokens
of the prefix cannot depend on x. An EOS is no text: it crosses as one more [SEP], which belongs to the part that it
stood in, so that a text that ended and a text that was cut are not the same. The frame, [CLS] and the last [SEP],
belongs to neither.

Text that does not survive is reported, not silently scored: bytes that are no UTF-8, tokens that their text does not
give back, characters that the encoder does not know or drops. What it does with case and white space is its reading.
"""

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import tokenizers
from jaxtyping import Bool, Int
from torch import Tensor

from freenergy.corpus import Tokenizer
from freenergy.errors import UserError
from freenergy.sequences import Continuations, Sequences
from freenergy.storage import write_text

NOT_UTF8 = "bytes that are not UTF-8"
NOT_INVERTIBLE = "tokens that their text does not give back"
UNKNOWN = "characters that the encoder does not know"

_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_FRAME, _PREFIX, _CONTINUATION = 0, 1, 2
Marked = list[tuple[int, int]]  # tokens of the encoder, each with the part that it belongs to


@final
@dataclass(frozen=True, slots=True)
class Together:
    """Whole strings as the encoder reads them, and which of their tokens belong to the prefix and to x."""

    rows: Sequences
    in_prefix: Bool[Tensor, "B N T"]
    in_x: Bool[Tensor, "B N T"]
    losses: list[frozenset[str]]  # of each string, context-major


@final
@dataclass(frozen=True, slots=True)
class Apart:
    """Prefixes once and continuations beside them, and which of their tokens are text."""

    x: Continuations
    in_prefix: Bool[Tensor, "B P"]
    in_x: Bool[Tensor, "B N L"]
    losses: list[frozenset[str]]


@final
@dataclass(frozen=True, slots=True)
class _Document:
    """Text without an EOS in it: the part in the prefix, the part in x, and where its EOS stood (or the frame)."""

    prefix: list[int]
    x: list[int]
    ending: int


@final
@dataclass(frozen=True, slots=True)
class _Encoded:
    """The encoder's tokens of a text, and the character after each."""

    ids: list[int]
    ends: list[int]
    losses: frozenset[str]


@final
class Crossing:
    """Reads strings of one tokenizer with another."""

    def __init__(
        self, corpus: Tokenizer, encoder: tokenizers.Tokenizer, *, cls: int, sep: int, unk: int | None
    ) -> None:
        self.corpus, self.encoder = corpus, tokenizers.Tokenizer.from_str(encoder.to_str())
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.encoder.encode_special_tokens = True  # a text that spells a special token is plain text
        self.cls, self.sep, self.unk = cls, sep, unk
        self._dropped: dict[str, bool] = {}  # by character; offsets span what is dropped inside a word

    @classmethod
    def from_folder(cls, corpus: Tokenizer, folder: Path) -> "Crossing":
        """With the tokenizer of an encoder; never runs its code."""
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in _FILES):  # else an empty vocabulary is made up
            raise UserError(f"{folder} has no tokenizer (one of {', '.join(_FILES)}): fetch the encoder again")
        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            inner = loaded.backend_tokenizer
        except Exception as error:  # a converter may raise anything
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"{folder} has no tokenizer that loads ({reason}): fetch the encoder again") from error
        if loaded.cls_token_id is None or loaded.sep_token_id is None:
            raise UserError(
                f"the tokenizer in {folder} names no cls_token or sep_token: take an encoder as BERT is one"
            )
        return cls(corpus, inner, cls=loaded.cls_token_id, sep=loaded.sep_token_id, unk=loaded.unk_token_id)

    @property
    def special(self) -> dict[str, int | None]:
        """The encoder's tokens that are no text."""
        return {"cls": self.cls, "sep": self.sep, "unk": self.unk}

    def save(self, folder: Path) -> None:
        """Write the encoder's tokenizer."""
        write_text(folder / "tokenizer.json", self.encoder.to_str())

    @classmethod
    def from_saved(cls, corpus: Tokenizer, folder: Path, special: dict[str, Any]) -> "Crossing":
        """The way back from ``save`` and ``special``."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: the energy is not whole; train it again")
        return cls(corpus, tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), **special)

    def together(self, x: Continuations) -> Together:
        """Prefix and continuation as one text."""
        strings = [self._read(documents) for documents in _documents(x, self.corpus.eos)]
        encoded = self._encode(first + rest for parts, _ in strings for first, rest, _ in parts)
        rows, losses = [], []
        for parts, lost in strings:
            row: Marked = [(self.cls, _FRAME)]
            for first, rest, ending in parts:
                text = encoded[first + rest]
                sides = (_CONTINUATION if end > len(first) else _PREFIX for end in text.ends)
                row += [*zip(text.ids, sides, strict=True), *self._separator(ending)]
                lost |= text.losses
            rows.append([*row, (self.sep, _FRAME)])
            losses.append(lost)
        (B, N), (tokens, marks) = x.shape, _padded(rows)
        return Together(tokens, (marks == _PREFIX).view(B, N, -1), (marks == _CONTINUATION).view(B, N, -1), losses)

    def apart(self, x: Continuations) -> Apart:
        """Prefix and continuation each on its own; the prefix is the same for all its continuations."""
        strings = [self._read(documents) for documents in _documents(x, self.corpus.eos)]
        encoded = self._encode(text for parts, _ in strings for part in parts for text in part[:2])
        prefixes, rows, losses = [], [], []
        for parts, lost in strings:
            prefix: Marked = [(self.cls, _FRAME)]
            row: Marked = []
            for first, rest, ending in parts:
                prefix += [(token, _PREFIX) for token in encoded[first].ids]
                row += [(token, _CONTINUATION) for token in encoded[rest].ids]
                (prefix if ending == _PREFIX else row).extend(self._separator(ending))
                lost |= encoded[first].losses | encoded[rest].losses
            prefixes.append(prefix)
            rows.append([*row, (self.sep, _FRAME)])
            losses.append(lost)
        B, N = x.shape
        (contexts, of_prefix), (flat, of_x) = _padded(prefixes[::N]), _padded(rows)
        crossed = Continuations(contexts, flat.tokens.view(B, N, -1), flat.lengths.view(B, N))
        return Apart(crossed, of_prefix == _PREFIX, (of_x == _CONTINUATION).view(B, N, -1), losses)

    def _separator(self, ending: int) -> Marked:
        return [] if ending == _FRAME else [(self.sep, ending)]

    def _read(self, documents: list[_Document]) -> tuple[list[tuple[str, str, int]], frozenset[str]]:
        """The texts of each document's two parts and where it ends; and what was lost on the way."""
        parts, lost = [], frozenset[str]()
        for document in documents:
            first, rest, losses = self._text(document.prefix, document.x)
            parts.append((first, rest, document.ending))
            lost |= losses
        return parts, lost

    def _text(self, prefix: list[int], x: list[int]) -> tuple[str, str, frozenset[str]]:
        """Exact where the corpus is byte-level: a character that the boundary splits belongs to x."""
        table = self.corpus.bytes_of_tokens
        if table is not None:
            before, after = (b"".join(table[token] for token in part) for part in (prefix, x))
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            first, rest = decoder.decode(before), decoder.decode(after, final=True)
            return first, rest, frozenset() if (first + rest).encode() == before + after else frozenset([NOT_UTF8])
        first, text = self.corpus.decode(prefix), self.corpus.decode(prefix + x)
        is_exact = text.startswith(first) and self.corpus.encode(text) == prefix + x
        rest = text[len(first) :] if text.startswith(first) else self.corpus.decode(x)
        return first, rest, frozenset() if is_exact else frozenset([NOT_INVERTIBLE])

    def _encode(self, texts: Iterator[str]) -> dict[str, _Encoded]:
        """Every text once."""
        unique = list(dict.fromkeys(texts))
        encodings = self.encoder.encode_batch(unique, add_special_tokens=False)
        return {text: self._encoded(text, encoding) for text, encoding in zip(unique, encodings, strict=True)}

    def _encoded(self, text: str, encoding: tokenizers.Encoding) -> _Encoded:
        covered = {place for start, end in encoding.offsets for place in range(start, end)}
        is_lossy = self.unk in encoding.ids or any(
            not char.isspace() and (place not in covered or self._drops(char)) for place, char in enumerate(text)
        )
        ends = [end for _, end in encoding.offsets]
        return _Encoded(encoding.ids, ends, frozenset([UNKNOWN]) if is_lossy else frozenset())

    def _drops(self, char: str) -> bool:
        """Whether the encoder's normaliser leaves nothing of a character; accents are its reading, as case is."""
        if char not in self._dropped:
            left = char if self.encoder.normalizer is None else self.encoder.normalizer.normalize_str(char)
            self._dropped[char] = not left.strip() and not unicodedata.combining(char)
        return self._dropped[char]


def _documents(x: Continuations, eos: int) -> Iterator[list[_Document]]:
    """Each string, context-major, cut at its EOS tokens."""
    for context, continuations in zip(x.contexts.lists(), x.lists(), strict=True):
        for continuation in continuations:
            documents, parts = [], ([], [])  # type: tuple[list[_Document], tuple[list[int], list[int]]]
            marks = [_PREFIX] * len(context) + [_CONTINUATION] * len(continuation)
            for token, mark in zip(context + continuation, marks, strict=True):
                if token == eos:
                    documents.append(_Document(*parts, mark))
                    parts = ([], [])
                else:
                    parts[mark - _PREFIX].append(token)
            yield [*documents, _Document(*parts, _FRAME)]


def _padded(rows: Sequence[Marked]) -> tuple[Sequences, Int[Tensor, "rows T"]]:
    """Tokens and marks; padding has the mark of the frame."""
    tokens = Sequences.from_lists([[token for token, _ in row] for row in rows])
    return tokens, Sequences.from_lists([[mark for _, mark in row] for row in rows]).tokens


def no_room(needed: int, limit: int) -> UserError:
    """Say that a text is longer than the encoder can read."""
    return UserError(
        f"prefix and continuation are {needed} tokens of the encoder, which reads {limit}: set corpus.prefix lower"
    )
