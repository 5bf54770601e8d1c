"""Sentences as numbers: what a neural tagger reads.

    word → number (0: rare or unknown), shape → number, characters → numbers, 2- to 5-grams of <word> → hashed buckets

Rows are words one after another, not padded: N words of B sentences. Characters and n-grams are those of the U distinct
words of a batch, ``which`` says which of them each word is.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from freenergy.tagging.sentences import Sentence, TagSet
from freenergy.tagging.templates import shape_of

_CHARACTERS, _GRAMS = 24, (2, 3, 4, 5)  # longest word that the characters show, and sizes of n-grams
UNSEEN = 0


class Words(NamedTuple):
    """A batch of sentences."""

    words: Int[Tensor, " N"]
    shapes: Int[Tensor, " N"]
    columns: Int[Tensor, "N C"]
    which: Int[Tensor, " N"]
    characters: Int[Tensor, "U L"]
    grams: Int[Tensor, " G"]
    offsets: Int[Tensor, " U"]
    lengths: Int[Tensor, " B"]
    sentences: tuple[Sentence, ...]


class Labels(NamedTuple):
    """The true tags of a batch: numbers, and where some are known in part the sets of tags."""

    y: Int[Tensor, "B T"]  # −1 behind the end
    sets: Bool[Tensor, "B T K"] | None


@final
@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Numbers of words, shapes, characters and values of columns, from the training sentences; 0 is unseen."""

    words: dict[str, int]
    shapes: dict[str, int]
    characters: dict[str, int]
    columns: tuple[dict[str, int], ...]
    buckets: int
    cache: dict[str, tuple[int, int, Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, sentences: Sequence[Sentence], *, min_count: int, buckets: int) -> "Vocabulary":
        """Returns the numbers of what these sentences have."""
        words = Counter(word.lower() for sentence in sentences for word in sentence.words)
        shapes = Counter(shape_of(word) for sentence in sentences for word in sentence.words)
        characters = Counter(letter for sentence in sentences for word in sentence.words for letter in word)
        width = len(sentences[0].columns[0]) if sentences[0].columns else 0
        columns = [Counter(each[i] for sentence in sentences for each in sentence.columns) for i in range(width)]
        return cls(
            _numbered(words, min_count), _numbered(shapes, 2), _numbered(characters, 2),
            tuple(_numbered(column, 1) for column in columns), buckets,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON-like values: lists in the order of their numbers."""
        found = {name: list(getattr(self, name)) for name in ("words", "shapes", "characters")}
        return found | {"columns": [list(each) for each in self.columns], "buckets": self.buckets}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocabulary":
        """Reads what ``to_json`` has returned."""
        words, shapes, characters = (_from_list(value[name]) for name in ("words", "shapes", "characters"))
        return cls(words, shapes, characters, tuple(map(_from_list, value["columns"])), value["buckets"])

    def read(self, sentences: Sequence[Sentence]) -> Words:
        """Returns the numbers of a batch."""
        own = dict[str, int]()
        rows = [own.setdefault(word, len(own)) for sentence in sentences for word in sentence.words]
        known = [self._word(word) for word in own]
        which = torch.tensor(rows)
        words, shapes = (torch.tensor([each[i] for each in known])[which] for i in (0, 1))
        values = [
            [column.get(value, UNSEEN) for column, value in zip(self.columns, each, strict=True)]
            for sentence in sentences
            for each in sentence.columns
        ]
        longest = max(len(each[2]) for each in known)
        characters = np.zeros((len(known), max(longest, 3)), dtype=np.int64)
        for row, each in zip(characters, known, strict=True):
            row[: len(each[2])] = each[2]
        sizes = np.array([len(each[3]) for each in known])
        return Words(
            words, shapes, torch.tensor(values, dtype=torch.long).view(len(rows), -1), which,
            torch.from_numpy(characters), torch.from_numpy(np.concatenate([each[3] for each in known])),
            torch.from_numpy(np.cumsum(sizes) - sizes), torch.tensor([len(sentence) for sentence in sentences]),
            tuple(sentences),
        )  # fmt: skip

    def _word(self, word: str) -> tuple[int, int, Any, Any]:
        found = self.cache.get(word)
        if found is None:
            letters = np.array([self.characters.get(letter, UNSEEN) for letter in word[:_CHARACTERS]], dtype=np.int64)
            number = self.words.get(word.lower(), UNSEEN)
            found = number, self.shapes.get(shape_of(word), UNSEEN), letters, self._grams(word)
            self.cache[word] = found
        return found

    def _grams(self, word: str) -> Any:
        """Returns the buckets of the n-grams of <word>; at least one."""
        text = f"<{word[:40]}>"
        grams = {text[i : i + n] for n in _GRAMS for i in range(len(text) - n + 1)}
        return np.array(sorted(zlib.crc32(gram.encode()) % self.buckets for gram in grams), dtype=np.int64)


def _numbered(counts: Counter[str], least: int) -> dict[str, int]:
    return _from_list(sorted(item for item, count in counts.items() if count >= least))


def _from_list(items: Iterable[str]) -> dict[str, int]:
    return {item: number for number, item in enumerate(items, 1)}


def labels_of(sentences: Sequence[Sentence], tags: TagSet, *, partial: bool = False) -> Labels:
    """Returns the true tags of a batch."""
    T, K = max(map(len, sentences)), len(tags)
    y = torch.full((len(sentences), T), -1)
    if not partial:
        numbers = {name: number for number, name in enumerate(tags.names)}
        for row, sentence in zip(y, sentences, strict=True):
            known = [numbers[tag] if tag in numbers else tags.number(tag) for tag in sentence.tags]
            row[: len(sentence)] = torch.tensor(known)
        return Labels(y, None)
    sets = torch.ones(len(sentences), T, K, dtype=torch.bool)
    for own, sentence in zip(sets, sentences, strict=True):
        for place, tag in enumerate(sentence.tags):
            own[place] = tags.allowed(tag, partial=True)
    is_known = sets.sum(2) == 1
    return Labels(torch.where(is_known, sets.int().argmax(2), -1), sets)


def to_device(words: Words, device: torch.device) -> Words:
    """Returns a batch on another device."""
    moved: dict[str, Any] = {
        name: each.to(device) for name, each in words._asdict().items() if isinstance(each, Tensor)
    }
    return words._replace(**moved)
