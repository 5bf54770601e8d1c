"""Discrete features of sentences: one weight for each pattern that the training text has often enough.

    U(x) = Σ_i λ_i f_i(x),        f_i(x) = how many places of x have pattern i

The features of R sentences are a sparse matrix [R, F]: built by look-ups in hash tables of exact keys, block by block.
A change of one token changes U only at that place and up to ``reach`` places behind it, so a single-site move costs
O(reach) pattern look-ups and not a sentence.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float64, Int32, Int64, Integer
from scipy.sparse import csr_matrix

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint
from freenergy.core.progress import SILENT, Progress
from freenergy.core.sentences import Sentences
from freenergy.energies.sparse.classes import word_classes
from freenergy.energies.sparse.key_table import MISSING, KeyTable
from freenergy.energies.sparse.patterns import LENGTH, NO_KEY, TYPES, Boundary, Pattern, PatternText, patterns_of

_BLOCK = 1 << 16  # places whose features are looked up at once: 8 MB


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSettings:
    """Which patterns get a weight: types of Table 3.2, and how often the training text must have them."""

    types: tuple[str, ...] = ("w", "c", "ws", "cs", "wsh", "csh", "tied", "len")
    cutoff: int = 3  # least count of a pattern
    cutoffs: dict[str, int] = field(default_factory=dict)  # of single types
    classes: int = 256
    passes: int = 3  # of the exchange algorithm over all words
    boundary: Boundary = "both"

    def __post_init__(self) -> None:
        patterns_of(self.types)
        check_range(self, "cutoff", at_least=1)
        check_range(self, "classes", at_least=2)
        check_range(self, "passes", at_least=0)
        for name, cut in self.cutoffs.items():
            if name not in TYPES or cut < 1:
                raise UserError(f"cutoffs.{name} is {cut}: name a type of {', '.join(TYPES)} and a count of 1 or more")

    def cut(self, name: str) -> int:
        """Return the least count of a type's patterns."""
        return self.cutoffs.get(name, self.cutoff)


class _Group(NamedTuple):
    """One pattern with its table."""

    type: str
    pattern: Pattern
    table: KeyTable


@final
class SparseFeatures:
    """The features of a training text: tables of patterns, and the classes of words.

    >>> text = Sentences.from_lists([[1, 2, 0], [1, 2, 0], [2, 0]])
    >>> found = SparseFeatures.fit(text, SparseSettings(types=("w", "len"), cutoff=2, classes=2), vocab_size=3, eos=0)
    >>> found.matrix(text).sum(1).ravel().tolist()
    [[10.0, 10.0, 3.0]]
    """

    def __init__(
        self,
        settings: SparseSettings,
        classes: Int64[np.ndarray, " V"],
        keys: Mapping[str, Int64[np.ndarray, " _"]],
        *,
        eos: int,
    ) -> None:
        self.settings, self.classes, self.eos, self.vocab_size = settings, classes, eos, len(classes)
        self.groups: list[_Group] = []
        first = 0
        for name, pattern in patterns_of(settings.types):
            table = KeyTable(keys[_label(name, pattern)], first)
            self.groups.append(_Group(name, pattern, table))
            first += len(table)
        self.lengths = KeyTable(keys.get(LENGTH, np.zeros(0, dtype=np.int64)), first)
        self.num = first + len(self.lengths)

    @classmethod
    def fit(
        cls,
        text: Sentences,
        settings: SparseSettings,
        *,
        vocab_size: int,
        eos: int,
        progress: Progress = SILENT,
    ) -> "SparseFeatures":
        """Find the word classes, then every pattern that the text has often enough."""
        if any(symbol == "c" for _, pattern in patterns_of(settings.types) for symbol in pattern.symbols):
            classes = word_classes(
                text.tokens,
                vocab_size=vocab_size,
                eos=eos,
                num_classes=min(settings.classes, vocab_size),
                passes=settings.passes,
                progress=progress,
            )
        else:
            classes = np.zeros(vocab_size, dtype=np.int64)
        places = PatternText(text.tokens, text.bounds, classes, eos, settings.boundary)
        keys: dict[str, Int64[np.ndarray, " _"]] = {}
        wanted = patterns_of(settings.types)
        with progress.track("patterns", len(wanted), "patterns") as advance:
            for name, pattern in wanted:
                found = np.concatenate([places.keys(pattern, each) for each in pattern.offsets])
                keys[_label(name, pattern)] = _frequent(found[found != NO_KEY], settings.cut(name))
                advance(1)
        if LENGTH in settings.types:
            keys[LENGTH] = _frequent(places.lengths, settings.cut(LENGTH))
        return cls(settings, classes, keys, eos=eos)

    def matrix(self, text: Sentences) -> csr_matrix:
        """Return the counts of all features in each sentence, float32 [R, F]; a repeated pattern has two entries."""
        ids, sizes = [], []
        for block in text.blocks(_BLOCK):
            found, per_sentence = self._block(block)
            ids.append(found)
            sizes.append(per_sentence)
        indices = np.concatenate([np.zeros(0, dtype=np.int32), *ids])
        indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, dtype=np.int64), *sizes]))])
        ones = np.ones(len(indices), dtype=np.float32)
        return csr_matrix((ones, indices, indptr), shape=(text.num, self.num), copy=False)

    def potential(self, text: Sentences, weights: Float64[np.ndarray, " F"]) -> Float64[np.ndarray, " R"]:
        """Return U = λ · f of each sentence, block by block: nothing grows with the number of features found."""
        padded = np.append(weights, 0.0)  # −1 stands for a missing feature
        parts = [np.zeros(0)]
        for block in text.blocks(_BLOCK):
            ids = self._ids(block)
            per_place = padded[ids].sum(1)
            parts.append(np.add.reduceat(per_place, block.bounds[:-1]) if block.num else np.zeros(0))
        return np.concatenate(parts)

    def _block(self, text: Sentences) -> tuple[Int32[np.ndarray, " nnz"], Int64[np.ndarray, " R"]]:
        ids = self._ids(text)
        there = ids != MISSING
        per_place = np.count_nonzero(there, axis=1)
        return ids[there], np.add.reduceat(per_place, text.bounds[:-1]).astype(np.int64)

    def _ids(self, text: Sentences) -> Int32[np.ndarray, "T columns"]:
        """Return the features at each place, −1 where there is none; row-major, so places stay in order."""
        places = self._text(text)
        columns = [(group, offsets) for group in self.groups for offsets in group.pattern.offsets]
        ids = np.full((len(text.tokens), len(columns) + 1), MISSING, dtype=np.int32)
        for i, (group, offsets) in enumerate(columns):
            if len(group.table):
                ids[:, i] = group.table.find(places.keys(group.pattern, offsets))
        if len(self.lengths):
            ids[text.bounds[1:] - 1, -1] = self.lengths.find(places.lengths)
        return ids

    def _text(self, text: Sentences) -> PatternText:
        return PatternText(text.tokens, text.bounds, self.classes, self.eos, self.settings.boundary)

    @property
    def reach(self) -> int:
        """How many places behind a token can have a pattern with it."""
        return max((group.pattern.reach for group in self.groups), default=0)

    def site_potentials(
        self, sentence: Integer[np.ndarray, " L"], place: int, weights: Float64[np.ndarray, " F"]
    ) -> Float64[np.ndarray, " V"]:
        """Return U(x) for every word at one place of a sentence, up to a constant: O(reach) look-ups for each word.

        The place must be a word: EOS ends the sentence. For EOS the number is −inf.
        """
        if not 0 <= place < len(sentence) - 1:
            raise UserError(f"place {place} is no word of a sentence of {len(sentence) - 1}: take 0 or more")
        end = min(place + self.reach + 1, len(sentence))
        begin = max(0, place - self.reach)
        V, padded = self.vocab_size, np.append(weights, 0.0)
        near = np.tile(np.asarray(sentence[begin:end], dtype=np.int64), (V, 1))
        near[:, place - begin] = np.arange(V)
        found = np.zeros(V)
        for group in self.groups:
            for offsets in group.pattern.offsets:
                for at in range(place, end):
                    if at - place in offsets and len(group.table):
                        keys = self._keys_at(
                            near, at - begin, at, group.pattern, offsets, is_end=at == len(sentence) - 1
                        )
                        if keys is not None:
                            found += padded[group.table.find(keys)]
        found[self.eos] = -np.inf
        return found

    def _keys_at(
        self,
        near: Int64[np.ndarray, "V n"],
        column: int,
        at: int,
        pattern: Pattern,
        offsets: tuple[int, ...],
        *,
        is_end: bool,
    ) -> Int64[np.ndarray, " V"] | None:
        """Return the pattern's key at one place for all versions of a sentence, None where there is none."""
        inside = self.settings.boundary == "none"
        if at + 1 - inside < offsets[0] or (inside and is_end):
            return None
        sizes = {"w": self.vocab_size, "c": int(self.classes.max(initial=0)) + 1}
        key = np.zeros(len(near), dtype=np.int64)
        for symbol, offset in zip(pattern.symbols, offsets, strict=True):
            tokens = near[:, column - offset] if at >= offset else np.full(len(near), self.eos)
            key = key * sizes[symbol] + (tokens if symbol == "w" else self.classes[tokens])
        return key

    @cached_property
    def fingerprint(self) -> str:
        """Return a name that equal features share."""
        return fingerprint([self.arrays_digest(), self.eos])

    def arrays(self) -> dict[str, Any]:
        """Return all arrays by name, for a file."""
        found: dict[str, Any] = {"classes": self.classes, "keys.len": self.lengths.keys}
        return found | {f"keys.{_label(g.type, g.pattern)}": g.table.keys for g in self.groups}

    def arrays_digest(self) -> list[str]:
        """Return a digest of each array."""
        return [hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for a in self.arrays().values()]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], settings: SparseSettings, *, eos: int) -> "SparseFeatures":
        """Read what ``arrays`` wrote."""
        keys = {name.removeprefix("keys."): value for name, value in arrays.items() if name.startswith("keys.")}
        return cls(settings, arrays["classes"], keys, eos=eos)


def _label(name: str, pattern: Pattern) -> str:
    return f"{name}.{''.join(pattern.symbols)}.{''.join(map(str, pattern.offsets[0]))}"


def _frequent(keys: Int64[np.ndarray, " _"], cut: int) -> Int64[np.ndarray, " _"]:
    found, counts = np.unique(keys, return_counts=True)
    frequent: Int64[np.ndarray, " _"] = found[counts >= cut].astype(np.int64)
    return frequent
