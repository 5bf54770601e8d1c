"""Text to tokens and back, with a fingerprint that identifies the tokenizer.

    encode: text → t_1 … t_n,      decode(encode(text)) = text   (byte-level),      EOS ends a document and is not text

Encoding never adds a special token, and text that happens to spell one is plain text, so EOS is in a stream only
where a document ends. A tokenizer is loaded, or learned from the training split:

    byte-pair:  begin with 256 bytes; again and again, join the most frequent pair of neighbours into a new token
    words:      the V most frequent strings between white space; all others are <unk>
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from freenergy.core.errors import UserError, first_line
from freenergy.core.files import fingerprint, intact, read_json, write_json, write_text
from freenergy.corpus.settings import BytePairTokenizer, WordTokenizer

EOS_TOKEN = "<|endoftext|>"
UNKNOWN = "<unk>"
_FED = 1 << 16  # characters: the library gathers 256 texts before it begins to count
_EVERY_WORD = 2**31 - 1
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"


@final
class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with an EOS token that ends documents."""

    def __init__(self, inner: tokenizers.Tokenizer, eos: int) -> None:
        inner.no_truncation()  # some checkpoints ship with both enabled; a corpus is neither cut nor padded
        inner.no_padding()
        inner.encode_special_tokens = True
        if eos < 0 or inner.id_to_token(eos) is None:
            raise UserError(f"the tokenizer has no token {eos}, which should be EOS: fix eos_token_id in config.json")
        self._inner = inner
        self.eos = eos

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library."""
        return self._inner

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; ids are below it."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same tokens and end documents alike."""
        return fingerprint({"tokenizer": self._state, "eos": self.eos})

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        try:
            return list(self._inner.encode(text, add_special_tokens=False).ids)
        except TypeError:  # half of a surrogate pair, which a terminal makes from bytes that are not UTF-8
            raise UserError(f"the text {text[:40]!r} is not UTF-8: give it in that encoding") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text; special tokens are skipped."""
        return str(self._inner.decode([i for i in ids if i != self.eos], skip_special_tokens=True))

    @cached_property
    def bytes_of_tokens(self) -> list[bytes] | None:
        """The bytes of each token if the vocabulary is byte-level, else None."""
        if not _mentions_byte_level(self._state.get("decoder")):
            return None
        alphabet = byte_alphabet()
        table = [b""] * self.vocab_size
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            table[i] = b"".join(alphabet.get(char, char.encode()) for char in token)
        for i, added in self._inner.get_added_tokens_decoder().items():
            table[i] = b"" if added.special else added.content.encode()
        table[self.eos] = b""
        return table

    def save(self, folder: Path) -> None:
        """Write a folder that ``transformers.AutoTokenizer`` and ``from_pretrained`` load."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self._inner.id_to_token(self.eos),
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / _CONFIG, config)
        write_text(folder / _FILE, self._inner.to_str())

    @classmethod
    def from_pretrained(cls, path: Path) -> "Tokenizer":
        """Load the tokenizer of a model: a folder in Hugging Face form, or a GGUF file. Never runs remote code."""
        if path.is_dir() and (path / _FILE).is_file():
            inner = _from_file(path / _FILE)
            return cls(inner, _eos_of_folder(path, inner))
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return cls(*_through_transformers(path))
        raise UserError(f"there is no tokenizer at {path}: give a model's folder (with {_FILE} in it) or a .gguf file")

    @cached_property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._inner.to_str())
        return state


def byte_alphabet() -> dict[str, bytes]:
    """Return byte-level BPE's character for each byte: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}
    return {char: bytes([byte]) for char, byte in characters.items()}


def _mentions_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_mentions_byte_level, decoder.get("decoders", ())))


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(intact(path).read_text(encoding="utf-8"))
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer ({error}): download the model's folder again") from None


def _eos_of_folder(folder: Path, inner: tokenizers.Tokenizer) -> int:
    """Return EOS by name from the tokenizer's files, else by id from the model's."""
    for name in (_CONFIG, "special_tokens_map.json"):
        token = _entry(folder / name, "eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        eos = inner.token_to_id(token) if isinstance(token, str) else None
        if eos is not None:
            return int(eos)
    for name in ("config.json", "generation_config.json"):
        eos = _entry(folder / name, "eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int):
            return eos
    raise UserError(f"the tokenizer in {folder} does not define EOS: add eos_token to {folder / _CONFIG}")


def _entry(path: Path, key: str) -> Any:
    return read_json(path).get(key) if path.is_file() else None


def _through_transformers(path: Path) -> tuple[tokenizers.Tokenizer, int]:
    from transformers import AutoTokenizer

    where, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        loaded = AutoTokenizer.from_pretrained(str(where), local_files_only=True, trust_remote_code=False, **extra)
        inner = loaded.backend_tokenizer
    except Exception as error:  # a converter may raise anything
        raise UserError(
            f"transformers cannot load a tokenizer from {path} ({first_line(error)}): save it with save_pretrained"
        ) from error
    if loaded.eos_token_id is None:
        raise UserError(f"the tokenizer in {path} does not define EOS: set its eos_token")
    return tokenizers.Tokenizer.from_str(inner.to_str()), int(loaded.eos_token_id)


def learn(settings: BytePairTokenizer | WordTokenizer, texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer that the settings describe."""
    if isinstance(settings, WordTokenizer):
        return _learn_words(settings, texts)
    return _learn_byte_pairs(settings, texts)


def sample(texts: Iterable[str], total: int, most: int) -> Iterator[str]:
    """Texts spread evenly over a stream of ``total`` characters, about ``most`` of them."""
    seen, kept = 0, 0
    for text in texts:
        seen += len(text)
        if kept * total < most * seen and kept < most:
            kept += len(text)
            yield text


def _learn_byte_pairs(settings: BytePairTokenizer, texts: Iterable[str]) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_small(texts), trainer)
    return Tokenizer(inner, inner.get_vocab()[EOS_TOKEN])


def _learn_words(settings: WordTokenizer, texts: Iterable[str]) -> Tokenizer:
    counter = tokenizers.Tokenizer(models.WordLevel())
    counter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=_EVERY_WORD, min_frequency=0, special_tokens=[], show_progress=False)
    counter.train_from_iterator(_small(texts), trainer)
    ranked = sorted(counter.get_vocab(), key=counter.get_vocab().__getitem__)
    words = [UNKNOWN, *(word for word in ranked if word not in (UNKNOWN, EOS_TOKEN))]
    if settings.vocab_size is not None:
        words = words[: settings.vocab_size - 1]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # outside the model's vocabulary, so that a text with this very word in it does not end there
    inner.add_special_tokens([EOS_TOKEN])
    return Tokenizer(inner, inner.get_vocab()[EOS_TOKEN])


def _small(texts: Iterable[str]) -> Iterator[str]:
    """Yield the same text in parts small enough that 256 of them are nothing, cut at white space."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _FED
            if stop < len(text):
                stop = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
                stop = stop if stop > start else start + _FED
            yield text[start:stop]
            start = stop
