"""From the tokens of the corpus, through text, to the tokens of an encoder.

    (c, x)  →  bytes  →  text of c, text of x  →  [CLS] tokens of c + x [SEP]     with a mark at every token

What the encoder reads depends on the two texts alone, never on how they were cut into tokens. Together, prefix and
continuation are encoded as one text, so that a word across the boundary is one word; a token that covers any character
of x belongs to x. Apart (for a prefix that is read once), the two texts are encoded each on its own, so that the tokens
of the prefix cannot depend on x. An EOS is not text: it crosses as one more [SEP], which belongs to the part that it
stood in, so that a text that ended and a text that was cut are not the same. The frame, [CLS] and the last [SEP],
belongs to neither.

Text that does not survive is reported, not silently scored: bytes that are not UTF-8, tokens that their text does not
give back, characters that the encoder does not know or drops. What it does with case and white space is its reading.
"""

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import tokenizers
from jaxtyping import Bool, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import write_text
from freenergy.core.sequences import Continuations, Sequences
from freenergy.corpus import Tokenizer

NOT_UTF8 = "bytes that are not UTF-8"
NOT_INVERTIBLE = "tokens that their text does not give back"
UNKNOWN = "characters that the encoder does not know"

_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_FRAME, _PREFIX, _CONTINUATION = 0, 1, 2
Parts = list[tuple[str, str, int]]  # of each document its text in the prefix and in x, and where its EOS stood
Marked = list[tuple[int, int]]  # tokens of the encoder, each with the part that it belongs to


class Together(NamedTuple):
    """Whole strings as the encoder reads them, and which of their tokens belong to the prefix and to x."""

    rows: Sequences
    in_prefix: Bool[Tensor, "B N T"]
    in_x: Bool[Tensor, "B N T"]
    losses: list[frozenset[str]]  # of each string, context-major

    @property
    def longest(self) -> int:
        """Return how many tokens the encoder must be able to read."""
        return int(self.rows.lengths.max()) if len(self.rows) else 0


class Apart(NamedTuple):
    """Prefixes once and continuations next to them, and which of their tokens are text."""

    x: Continuations
    in_prefix: Bool[Tensor, "B P"]
    in_x: Bool[Tensor, "B N L"]
    losses: list[frozenset[str]]

    @property
    def longest(self) -> int:
        """Return how many tokens the encoder must be able to read."""
        return int(self.x.contexts.lengths.max()) + int(self.x.lengths.max()) if self.x.lengths.numel() else 0


class _Begun(NamedTuple):
    """The part of a document that stands in the prefix, and the state of the decoder after it."""

    raw: bytes
    text: str
    state: tuple[bytes, int]


class _Encoded(NamedTuple):
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
        """Build it with the tokenizer of an encoder; its code is never run."""
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
        """Return the encoder's tokens that are not text."""
        return {"cls": self.cls, "sep": self.sep, "unk": self.unk}

    def save(self, folder: Path) -> None:
        """Write the encoder's tokenizer."""
        write_text(folder / "tokenizer.json", self.encoder.to_str())

    @classmethod
    def from_saved(cls, corpus: Tokenizer, folder: Path, special: dict[str, Any]) -> "Crossing":
        """Load what ``save`` wrote, given ``special``."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: the energy is not whole; train it again")
        return cls(corpus, tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), **special)

    def together(self, x: Continuations) -> Together:
        """Retokenize prefix and continuation as one text."""
        strings = self._read(x)
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
        """Retokenize prefix and continuation each on its own; the prefix is the same for all its continuations."""
        strings = self._read(x)
        encoded = self._encode(text for parts, _ in strings for part in parts for text in part[:2])
        (B, N), rows, losses = x.shape, [], []
        prefixes = [self._prefix(parts, encoded) for parts, _ in strings[::N]]
        for parts, lost in strings:
            row: Marked = []
            for first, rest, ending in parts:
                row += [(token, _CONTINUATION) for token in encoded[rest].ids]
                row += self._separator(ending) if ending != _PREFIX else []
                lost |= encoded[first].losses | encoded[rest].losses
            rows.append([*row, (self.sep, _FRAME)])
            losses.append(lost)
        (contexts, of_prefix), (flat, of_x) = _padded(prefixes), _padded(rows)
        crossed = Continuations(contexts, flat.tokens.view(B, N, -1), flat.lengths.view(B, N))
        return Apart(crossed, of_prefix == _PREFIX, (of_x == _CONTINUATION).view(B, N, -1), losses)

    def _separator(self, ending: int) -> Marked:
        return [] if ending == _FRAME else [(self.sep, ending)]

    def _prefix(self, parts: Parts, encoded: dict[str, _Encoded]) -> Marked:
        """Return the prefix alone, from the parts of any string that continues it."""
        prefix: Marked = [(self.cls, _FRAME)]
        for first, _, ending in parts:
            prefix += [(token, _PREFIX) for token in encoded[first].ids]
            prefix += self._separator(ending) if ending == _PREFIX else []
        return prefix

    def _read(self, x: Continuations) -> list[tuple[Parts, frozenset[str]]]:
        """Return, per string, the two texts of each document, where it ends, and what was lost."""
        strings = []
        for context, continuations in zip(x.contexts.lists(), x.lists(), strict=True):
            *ended, last = _split(context, self.corpus.eos)
            before = [(*self._text(document, self._begun(document), []), _PREFIX) for document in ended]
            begun = self._begun(last)
            for continuation in continuations:
                first, *rest = _split(continuation, self.corpus.eos)
                texts = [self._text(last, begun, first)] + [self._text([], self._begun([]), part) for part in rest]
                endings = [_CONTINUATION] * len(rest) + [_FRAME]
                found = before + [(*text, ending) for text, ending in zip(texts, endings, strict=True)]
                parts = [(first_text, text, ending) for first_text, text, _, ending in found]
                strings.append((parts, frozenset[str]().union(*(lost for _, _, lost, _ in found))))
        return strings

    def _begun(self, prefix: list[int]) -> _Begun:
        """Return the part of a document that stands in the prefix, decoded once for all its continuations."""
        table = self.corpus.bytes_of_tokens
        if table is None:
            return _Begun(b"", self.corpus.decode(prefix), (b"", 0))
        before, decoder = b"".join(table[token] for token in prefix), codecs.getincrementaldecoder("utf-8")("replace")
        return _Begun(before, decoder.decode(before), decoder.getstate())

    def _text(self, prefix: list[int], begun: _Begun, x: list[int]) -> tuple[str, str, frozenset[str]]:
        """Decode; exact where the corpus is byte-level: a character that the boundary splits belongs to x."""
        table, first = self.corpus.bytes_of_tokens, begun.text
        if table is not None:
            after, decoder = b"".join(table[token] for token in x), codecs.getincrementaldecoder("utf-8")("replace")
            decoder.setstate(begun.state)
            rest = decoder.decode(after, final=True)
            is_exact = (first + rest).encode() == begun.raw + after
            return first, rest, frozenset() if is_exact else frozenset([NOT_UTF8])
        text = self.corpus.decode(prefix + x)
        is_exact = text.startswith(first) and self.corpus.encode(text) == prefix + x
        rest = text[len(first) :] if text.startswith(first) else self.corpus.decode(x)
        return first, rest, frozenset() if is_exact else frozenset([NOT_INVERTIBLE])

    def _encode(self, texts: Iterator[str]) -> dict[str, _Encoded]:
        """Encode every distinct text once."""
        unique = list(dict.fromkeys(texts))
        encodings = self.encoder.encode_batch(unique, add_special_tokens=False)
        return {text: self._encoded(text, encoding) for text, encoding in zip(unique, encodings, strict=True)}

    def _encoded(self, text: str, encoding: tokenizers.Encoding) -> _Encoded:
        is_lossy, reached = self.unk in encoding.ids or any(self._drops(char) for char in set(text)), 0
        for start, end in [*sorted(encoding.offsets), (len(text), len(text))]:
            is_lossy = is_lossy or bool(text[reached:start].strip())  # white space is the encoder's reading
            reached = max(reached, end)
        ends = [end for _, end in encoding.offsets]
        return _Encoded(encoding.ids, ends, frozenset([UNKNOWN]) if is_lossy else frozenset())

    def _drops(self, char: str) -> bool:
        """Tell whether the encoder's normaliser drops a character; accents and case are not counted as lost."""
        if char not in self._dropped:
            left = char if self.encoder.normalizer is None else self.encoder.normalizer.normalize_str(char)
            self._dropped[char] = not (left.strip() or char.isspace() or unicodedata.combining(char))
        return self._dropped[char]


def _split(tokens: list[int], eos: int) -> list[list[int]]:
    """Cut at EOS tokens, which are left out; the last part is what has not ended."""
    parts = []
    while eos in tokens:
        end = tokens.index(eos)
        parts.append(tokens[:end])
        tokens = tokens[end + 1 :]
    return [*parts, tokens]


def _padded(rows: Sequence[Marked]) -> tuple[Sequences, Int[Tensor, "rows T"]]:
    """Pad tokens and marks; padding has the mark of the frame."""
    tokens = Sequences.from_lists([[token for token, _ in row] for row in rows])
    return tokens, Sequences.from_lists([[mark for _, mark in row] for row in rows]).tokens
