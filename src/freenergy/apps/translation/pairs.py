"""Sentences with their translations: read from a folder or a named resource, as tokens, in batches of similar length.

    split of a pair = f(hash of its first sentence)        (where a resource comes in one file)

so that a sentence with several translations is in one split with all of them. A sentence of the other language may
still translate two: a training pair with such a sentence of a held-out pair is left out.

    a batch = rows of the pairs sorted by target length,      rows · (longest target among them) ≤ tokens

Each epoch sorts them again: pairs of the same target length stand by source length with some noise, and the batches in
another order, both from the seed. Lengths stand in the same order in every epoch, so every epoch has the same batches
by their sizes, and batch number i is known without those before it.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from freenergy.apps.translation.settings import TranslationSettings
from freenergy.apps.translation.translator import Source
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import BytePairTokenizer, Tokenizer
from freenergy.corpus.resources import RESOURCES, locate
from freenergy.corpus.tokenizer import learn
from freenergy.lm.networks.protocol import Batch

_MADE_OF = "tokenizer_made_of.json"
_NOISE = 4.0  # tokens of source length that pairs of a batch may differ by


@final
@dataclass(frozen=True, slots=True)
class Pairs:
    """Sentences and their translations, line by line."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


class Splits(NamedTuple):
    """The three splits."""

    train: Pairs
    validation: Pairs
    test: Pairs


def read_pairs(settings: TranslationSettings, progress: Progress) -> Splits:
    """Load the pairs of all splits; raises ``UserError`` if one is empty."""
    place = locate(settings.path, progress)
    if settings.path in RESOURCES and not Path(settings.path).expanduser().exists():
        return _from_resource(settings, place)
    if not place.is_dir():
        raise UserError(f"{place} is not a folder: give one with files such as {settings.train}.{settings.source}")
    train, validation, test = (
        _from_files(place, split, settings) for split in (settings.train, settings.validation, settings.test)
    )
    return Splits(_without_blanks(train), validation, test)


def tokenizer_for(train: Pairs, vocabulary: int, folder: Path) -> Tokenizer:
    """Train one byte-pair vocabulary for both languages on the training pairs; cached in ``folder``."""
    made_of = fingerprint({"pairs": [train.source, train.target], "vocabulary": vocabulary})
    if (folder / _MADE_OF).is_file() and read_json(folder / _MADE_OF).get("fingerprint") == made_of:
        return Tokenizer.from_pretrained(folder)
    tokenizer = learn(BytePairTokenizer(vocab_size=vocabulary), [*train.source, *train.target])
    tokenizer.save(folder)
    write_json(folder / _MADE_OF, {"fingerprint": made_of})  # last: it marks the others as complete
    return tokenizer


def _from_files(folder: Path, split: str, settings: TranslationSettings) -> Pairs:
    source, target = (_lines(_find(folder, f"{split}.{language}")) for language in (settings.source, settings.target))
    if len(source) != len(target):
        raise UserError(
            f"{folder}/{split} has {len(source)} lines of {settings.source} and {len(target)} of {settings.target}: "
            "give files with corresponding lines"
        )
    if not any(map(str.strip, source)):
        raise UserError(f"{folder}/{split}.{settings.source} contains no sentence: give a file with one per line")
    return Pairs(source, target)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(
        f"there is no {name} or {name}.gz in {folder}: check translation.path, the splits and the languages"
    )


def _lines(path: Path) -> list[str]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}): download it again") from None
    return [line.strip() for line in lines]


def _without_blanks(pairs: Pairs) -> Pairs:
    kept = [(source, target) for source, target in zip(pairs.source, pairs.target, strict=True) if source and target]
    return Pairs([source for source, _ in kept], [target for _, target in kept])


def _from_resource(settings: TranslationSettings, folder: Path) -> Splits:
    """Read a table with a language in each of its first two columns, as in its name (``…-en-es``)."""
    resource = RESOURCES[settings.path]
    languages = resource.name.split("-")[-2:]
    if resource.kind != "pairs" or {settings.source, settings.target} != set(languages):
        known = ", ".join(name for name, other in RESOURCES.items() if other.kind == "pairs")
        raise UserError(
            f"{resource.name} has no pairs of {settings.source} and {settings.target}: resources of pairs, with their "
            f"languages at the end, are {known}"
        )
    rows = [line.split("\t")[:2] for line in _lines(folder / resource.splits["all"])]
    first, second = ([row[column] for row in rows if len(row) == 2 and all(row)] for column in (0, 1))
    splits = _split(list(zip(first, second, strict=True)), settings.held_out_share)
    parts = []
    for name in ("train", "validation", "test"):
        columns = dict(zip(languages, zip(*splits[name], strict=True), strict=True)) if splits[name] else {}
        if not columns:
            raise UserError(f"{resource.name} leaves no pair for the {name} split: change translation.held_out_share")
        parts.append(Pairs(list(columns[settings.source]), list(columns[settings.target])))
    return Splits(*parts)


def _split(pairs: list[tuple[str, str]], share: float) -> dict[str, list[tuple[str, str]]]:
    """Split by the hash of the first sentence; no held-out second sentence occurs in an earlier split."""
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "validation": [], "test": []}
    for pair in pairs:
        place = int.from_bytes(blake2b(pair[0].encode(), digest_size=8).digest(), "little") / 2**64
        splits["test" if place < share else "validation" if place < 2 * share else "train"].append(pair)
    seen = {second for _, second in splits["test"]}
    splits["validation"] = [pair for pair in splits["validation"] if pair[1] not in seen]
    seen |= {second for _, second in splits["validation"]}
    splits["train"] = [pair for pair in splits["train"] if pair[1] not in seen]
    return splits


@final
@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Tokens of sentences and of their translations, each with its EOS at the end."""

    source: list[list[int]]
    target: list[list[int]]

    @classmethod
    def of(cls, pairs: Pairs, tokenizer: Tokenizer) -> "EncodedPairs":
        """Encode both sides."""
        return cls(
            *([[*ids, tokenizer.eos] for ids in tokenizer.encode_batch(side)] for side in (pairs.source, pairs.target))
        )

    def fitting(self, longest: int) -> "EncodedPairs":
        """Return the pairs without those in which a side has more tokens."""
        return self.only([i for i in range(len(self)) if max(len(self.source[i]), len(self.target[i])) <= longest])

    def cut(self, longest: int) -> "EncodedPairs":
        """Return every pair; longer sentences are cut, and end with EOS."""
        return EncodedPairs(
            *([[*ids[:-1][: longest - 1], ids[-1]] for ids in side] for side in (self.source, self.target))
        )

    def __len__(self) -> int:
        return len(self.source)

    def only(self, rows: Sequence[int]) -> "EncodedPairs":
        """Return some of the pairs."""
        return EncodedPairs([self.source[i] for i in rows], [self.target[i] for i in rows])

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return some pairs as padded arrays."""
        return Batch(sources(self.source, rows), *padded([self.target[i] for i in rows]))


def sources(sentences: Sequence[list[int]], rows: Sequence[int]) -> Source:
    """Return some sentences as the input of a translator."""
    return Source(*padded([sentences[i] for i in rows]))


def padded(lists: Sequence[list[int]]) -> tuple[Int[Tensor, "rows T"], Bool[Tensor, "rows T"]]:
    """Return lists of tokens as one array with its mask; the padding repeats the last token, EOS."""
    T = max(map(len, lists))
    tokens = torch.tensor([[*ids, *[ids[-1]] * (T - len(ids))] for ids in lists])
    lengths = torch.tensor([len(ids) for ids in lists])
    return tokens, torch.arange(T) < lengths.unsqueeze(1)


def cut(ascending: Sequence[int], tokens: int) -> list[range]:
    """Split sorted lengths into batches of as many rows as fit ``tokens`` with padding, and at least one."""
    batches, first = [], 0
    for last, length in enumerate(ascending):
        if last > first and (last + 1 - first) * length > tokens:
            batches.append(range(first, last))
            first = last
    return [*batches, range(first, len(ascending))]


def by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return row numbers in batches of similar length."""
    order = np.argsort(np.array(lengths), kind="stable")
    return [order[list(places)].tolist() for places in cut([lengths[i] for i in order], tokens)]


@final
class PairData:
    """Training pairs in batches of about ``batch_size`` target tokens per step, and validation pairs in order."""

    def __init__(
        self,
        train: EncodedPairs,
        validation: EncodedPairs,
        *,
        batch_size: int,
        accumulate: int,
        held_out_tokens: int,
        rng: Rng,
    ) -> None:
        self.train, self.validation, self.rng = train, validation, rng.child("pairs")
        self.accumulate, self.held_out_tokens = accumulate, held_out_tokens
        self._source, self._target = (np.array([len(ids) for ids in side]) for side in (train.source, train.target))
        longest, tokens = int(self._target.max()), batch_size // accumulate
        if tokens < longest:
            raise UserError(
                f"a micro-batch of {tokens} target tokens is too small for the longest sentence of {longest}: for "
                f"translations batch_size counts tokens, so set it to {longest * accumulate} or more, such as 2048"
            )
        self._batches = cut(np.sort(self._target).tolist(), tokens)
        self._epoch = -1
        self._rows: Integer[np.ndarray, " pairs"] = np.zeros(0, dtype=np.int64)
        self._order: list[int] = []

    @property
    def epoch_steps(self) -> int:
        """The optimiser steps of about one epoch."""
        return -(-len(self._batches) // self.accumulate)

    def batch(self, step: int, micro: int) -> Batch:
        """Return the pairs of a micro-batch of step 1, 2, …."""
        epoch, place = divmod((step - 1) * self.accumulate + micro, len(self._batches))
        if epoch != self._epoch:
            self._begin(epoch)
        return self.train.batch(self._rows[list(self._batches[self._order[place]])].tolist())

    def held_out(self) -> Iterator[Batch]:
        """Yield the validation pairs, shortest first."""
        for rows in by_length([len(ids) for ids in self.validation.target], self.held_out_tokens):
            yield self.validation.batch(rows)

    def _begin(self, epoch: int) -> None:
        rng = self.rng.child("epoch", epoch)
        noise = _NOISE * rng.child("rows").uniform(len(self.train)).numpy()
        self._rows = np.lexsort((self._source + noise, self._target))
        self._order = rng.child("batches").permutation(len(self._batches)).tolist()
        self._epoch = epoch
