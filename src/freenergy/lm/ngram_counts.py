"""Counts of n-grams of token ids: what an n-gram language model remembers of a corpus.

    a(w_1 … w_k) = c(w_1 … w_k)                         for k = n, and for n-grams that begin a document
    a(w_1 … w_k) = |{v : c(v w_1 … w_k) > 0}|           for k < n: how many tokens it was seen to follow

c is how often a string occurs, a the adjusted count of Kneser and Ney. EOS before a document is its start symbol, a
context and never a prediction; EOS after it is its end symbol: nothing is counted across two documents.

The n-grams of k tokens are the nodes of level k of a trie, and level 0 is the empty string. The key of a node is its
parent's number · V + its last token; numbers follow the order of keys, so the children of a node lie side by side.
A node takes 12 bytes. A stream is counted block by block, so that only the number of different n-grams takes memory.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64, Integer

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint
from freenergy.core.progress import SILENT, Progress
from freenergy.core.sequences import Continuations, Sequences
from freenergy.lm.stepping import started

NONE = -1  # the token before a known string begins, and the node of a string that was never seen
_BLOCK = 1 << 18  # tokens counted at once, or as many as there are n-grams by then: some 150 bytes each while it runs


@final
@dataclass(frozen=True, slots=True, eq=False)
class CountLevel:
    """All n-grams of one length: their keys, ascending, and their adjusted counts."""

    keys: Int64[np.ndarray, " nodes"]
    counts: Int32[np.ndarray, " nodes"]

    def __len__(self) -> int:
        return len(self.keys)


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NgramCounts:
    """Adjusted counts of all n-grams of 1 … n tokens of a corpus; ``levels[k − 1]`` holds those of k tokens."""

    vocab_size: int
    eos: int
    levels: tuple[CountLevel, ...]

    @property
    def order(self) -> int:
        """Return n, the length of the longest n-grams."""
        return len(self.levels)

    @property
    def num_contexts(self) -> list[int]:
        """Return for each level the number of nodes that its n-grams continue."""
        return [1, *map(len, self.levels[:-1])]

    @property
    def fingerprint(self) -> str:
        """Return the name of these counts, by their content."""
        hashes = {name: hashlib.sha256(array.data).hexdigest() for name, array in self.arrays().items()}
        return fingerprint({"vocab_size": self.vocab_size, "eos": self.eos, "arrays": hashes})

    def arrays(self) -> dict[str, Int[np.ndarray, " nodes"]]:
        """Return the counts as named arrays, to be stored."""
        numbered = list(enumerate(self.levels, 1))
        return {f"keys.{k}": level.keys for k, level in numbered} | {
            f"counts.{k}": level.counts for k, level in numbered
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], *, vocab_size: int, eos: int, order: int) -> "NgramCounts":
        """Return the inverse of ``arrays``; KeyError where one is missing, ValueError where they do not fit."""
        levels = tuple(
            CountLevel(*columns(arrays[f"keys.{k}"], arrays[f"counts.{k}"], f"order {k}")) for k in range(1, order + 1)
        )
        return cls(vocab_size=vocab_size, eos=eos, levels=levels)

    def walk(
        self, strings: Int64[np.ndarray, "R W"]
    ) -> Iterator[tuple[Int64[np.ndarray, "R W+1"], Int64[np.ndarray, "R W"]]]:
        """Yield, level by level, the node of the k − 1 tokens before each place and of the k tokens that end there.

        The context behind the last place is that of the next token. A k-gram is a child of the one that ends before it.
        """
        R, W = strings.shape
        context = np.zeros((R, W + 1), dtype=np.int64)
        for level in self.levels:
            is_missing = (context[:, :-1] == NONE) | (strings == NONE)
            node = find(level.keys, np.where(is_missing, NONE, context[:, :-1] * self.vocab_size + strings))
            yield context, node
            # a longer n-gram that ends with EOS has no children, so no context reaches back beyond EOS
            context = np.concatenate([np.full((R, 1), NONE), node], axis=1)

    def tail(self, contexts: Sequences, length: int) -> Int64[np.ndarray, "B length"]:
        """Return the last tokens of each context; −1 before a short one, whose history is not known."""
        contexts = started(contexts, self.eos).to("cpu")
        self._check_ids(contexts)
        place = contexts.lengths.unsqueeze(1) + torch.arange(-length, 0)
        return np.asarray(torch.where(place < 0, NONE, contexts.tokens.gather(1, place.clamp(min=0))).numpy())

    def strings(self, x: Continuations, behind: int) -> Int64[np.ndarray, "R W"]:
        """Return the continuations, each after the last ``behind`` tokens of its context; −1 at padding."""
        self._check_ids(x.flat())
        tokens = torch.where(x.mask, x.tokens, NONE).flatten(0, 1).cpu().numpy()
        return np.concatenate([np.repeat(self.tail(x.contexts, behind), x.shape[1], axis=0), tokens], axis=1)

    def _check_ids(self, strings: Sequences) -> None:
        tokens = strings.tokens[strings.mask]
        strange = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(strange):
            raise UserError(
                f"token id {int(strange[0])} is not in the vocabulary of {self.vocab_size}: encode the text with the "
                "tokenizer of the text whose n-grams were counted"
            )


def find(keys: Int64[np.ndarray, " nodes"], asked: Int64[np.ndarray, "*places"]) -> Int64[np.ndarray, "*places"]:
    """Return the number of each key, or −1."""
    if len(keys) == 0:  # no document is as long as this order
        return np.full(asked.shape, NONE)
    few, inverse = np.unique(asked, return_inverse=True)  # in order, the search stays in the processor's cache
    node = np.minimum(np.searchsorted(keys, few), len(keys) - 1)
    return np.asarray(np.where(keys[node] == few, node, NONE)[inverse].reshape(asked.shape))


def columns(keys: Any, counts: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the same, once it is clear that they are a whole number for each key."""
    if keys.ndim != 1 or keys.shape != counts.shape or keys.dtype.kind != "i" or counts.dtype.kind != "i":
        raise ValueError(f"{what} has keys {keys.dtype} {keys.shape} and counts {counts.dtype} {counts.shape}")
    return keys, counts


def count(
    stream: Integer[np.ndarray, " tokens"], *, vocab_size: int, eos: int, order: int, progress: Progress = SILENT
) -> tuple[NgramCounts, list[Int64[np.ndarray, " nodes"]]]:
    """Count the n-grams of a stream of documents, each followed by EOS; return a, and c of each level.

    Level k comes from level k − 1: the k-gram that ends at place t is a child of the (k − 1)-gram that ends at t − 1.

    >>> counts, raw = count(np.array([1, 2, 0, 2, 0]), vocab_size=3, eos=0, order=2)
    >>> [level.counts.tolist() for level in counts.levels]  # 0 and 1 follow one token each, 2 follows EOS and 1
    [[1, 1, 2], [1, 1, 1, 2]]
    """
    _check(stream, vocab_size, eos, order)
    levels, raw = list[CountLevel](), list[np.ndarray]()
    with progress.track("counting n-grams", total=float(order), unit="orders") as advance:
        for _ in range(order):
            found = _level(stream, NgramCounts(vocab_size=vocab_size, eos=eos, levels=tuple(levels)))
            if levels:
                levels[-1] = _adjusted(levels[-1], found.suffix)
            levels.append(CountLevel(found.keys, found.raw.astype(np.int32)))
            raw.append(found.raw)
            advance(1.0)
    return NgramCounts(vocab_size=vocab_size, eos=eos, levels=tuple(levels)), raw


class _Found(NamedTuple):
    """Different n-grams of some places: keys, ascending, how often they occur, nodes of all but their first token."""

    keys: Int64[np.ndarray, " nodes"]
    raw: Int64[np.ndarray, " nodes"]
    suffix: Int64[np.ndarray, " nodes"]


def _level(stream: Integer[np.ndarray, " tokens"], shorter: NgramCounts) -> _Found:
    """Return the n-grams that are one token longer than the longest known ones."""
    k, V, eos = shorter.order + 1, shorter.vocab_size, shorter.eos
    start, none = 0, np.zeros(0, dtype=np.int64)
    found = _Found(none, none, none)
    while start < len(stream):
        end = start + max(_BLOCK, len(found.keys))
        first = max(0, start - k)  # as far back as n-grams that end in the block can begin, and the token before
        start_symbol = np.full(int(first == 0), eos)
        tokens = np.concatenate([start_symbol, stream[first:end].astype(np.int64)])
        ending = np.zeros(len(tokens), dtype=np.int64)
        for _, node in shorter.walk(tokens[None]):
            ending = node[0]
        # right after EOS the start symbol is all that a context can see
        before = ending if k < 3 else np.where(tokens == eos, NONE, ending)
        places = np.arange(start - first + len(start_symbol), len(tokens))
        places = places[before[places - 1] >= 0]
        keys, at, raw = np.unique(before[places - 1] * V + tokens[places], return_index=True, return_counts=True)
        found = _merged(found, _Found(keys, raw, ending[places][at]))
        start = end
    return found


def _merged(a: _Found, b: _Found) -> _Found:
    if not len(a.keys):
        return b
    joined = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    keys, at, inverse = np.unique(joined[0], return_index=True, return_inverse=True)
    raw = np.bincount(inverse, weights=joined[1]).astype(np.int64)  # exact below 2^53
    return _Found(keys, raw, joined[2][at])


def _adjusted(level: CountLevel, suffix: Int64[np.ndarray, " longer"]) -> CountLevel:
    """Replace raw counts by the number of tokens that precede; n-grams that begin a document have none and stay."""
    preceding = np.bincount(suffix, minlength=len(level)).astype(np.int32)
    return CountLevel(level.keys, np.where(preceding > 0, preceding, level.counts))


def _check(stream: Integer[np.ndarray, " tokens"], vocab_size: int, eos: int, order: int) -> None:
    if order < 1:
        raise UserError(f"an n-gram model of order {order} does not exist: set order to 1 or more")
    if not 0 <= eos < vocab_size:
        raise UserError(f"EOS is token {eos} but the vocabulary has ids 0 to {vocab_size - 1}: give the right EOS id")
    if len(stream) == 0:
        raise UserError("there are no tokens to count: give a corpus with at least one document")
    if int(stream.min()) < 0 or int(stream.max()) >= vocab_size:
        raise UserError(
            f"the corpus has token ids {stream.min()} to {stream.max()} but the vocabulary has {vocab_size}: "
            "encode the corpus with the tokenizer of this vocabulary"
        )
    if int(stream[-1]) != eos:
        raise UserError(f"the corpus ends with token {stream[-1]} and not with EOS ({eos}): end each document with it")
