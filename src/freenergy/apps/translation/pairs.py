"""Sentences with their translations: read from a folder or a named resource, and turned into tokens.

    split of a pair = f(hash of its first sentence)        (where a resource comes in one file)

so that a sentence with several translations is in one split with all of them. A sentence of the other language may
still translate two: a training pair with such a sentence of a held-out pair is left out.
"""

import gzip
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import final

from freenergy.apps.translation.settings import TranslationSettings
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.corpus import BytePairTokenizer, Tokenizer
from freenergy.corpus.learn import learn
from freenergy.corpus.resources import RESOURCES, locate

_MADE_OF = "tokenizer_made_of.json"


@final
@dataclass(frozen=True, slots=True)
class Pairs:
    """Sentences and their translations, line by line."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


@final
@dataclass(frozen=True, slots=True)
class Splits:
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
