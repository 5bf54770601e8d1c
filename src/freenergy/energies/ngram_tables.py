"""Counts of n-grams and skip-grams of a text, and what they say of places in another.

    c(hw): how often hw occurs,      a(hw): its adjusted count (``base.ngram_counts``),      p_0 = 1 / V
    p_k(w | h) = (a(hw) − D_k(a(hw))) / a(h·) + γ(h) · p_{k−1}(w | h′),      γ(h) = Σ_w D_k(a(hw)) / a(h·)

Own text finds itself: to a window of the training text each of its n-grams has been seen. ``own`` leaves a window's own
continuation out (``ngram_levels``). All of p_k follows exactly, but for D_k, which is a property of the whole text.

Keys are exact: a k-gram is its parent's number · V + its last token, as in ``base.ngram_counts``.
Legend: R strings of W tokens, of which the last L are the places that are asked about; order n.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write
from freenergy.core.progress import Progress, Silent
from freenergy.energies.ngram_levels import Groups, Level, without
from freenergy.lm.ngram_counts import NgramCounts, columns, count

_SILENT = Silent()
_NONE = -1  # the token before a known string begins, and the node of a string that was never seen
_BLOCK = 1 << 18  # places of the text that are looked up at once


class Seen(NamedTuple):
    """What the text says of each place: of the k-gram (or skip-gram) that ends there."""

    is_known: Bool[np.ndarray, "R L"]  # enough history, inside one document
    c: Int64[np.ndarray, "R L"]  # c(hw)
    history: Int64[np.ndarray, "R L"]  # c(h·)
    prob: Float64[np.ndarray, "R L"]  # p_k(w | h) with the history that there is; ones for skip-grams


@final
class NgramTables:
    """Counts of all n-grams of 1 … n tokens and of pairs with a gap, ready to be asked about many places at once."""

    def __init__(
        self, counts: NgramCounts, raw: list[Integer[np.ndarray, " _"]], pairs: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self.counts, self.raw, self.pairs = counts, raw, dict(sorted(pairs.items()))
        self.vocab_size, self.eos, self.order = counts.vocab_size, counts.eos, counts.order
        sizes = [1, *map(len, counts.levels[:-1])]
        self._levels = [
            Level.of(level.keys, seen, level.counts, size, self.vocab_size)
            for level, seen, size in zip(counts.levels, raw, sizes, strict=True)
        ]

    @cached_property
    def fingerprint(self) -> str:
        """Return a name that two tables with the same counts share."""
        arrays = [array for level in self.counts.levels for array in (level.keys, level.counts)]
        arrays += [*self.raw, *(array for pair in self.pairs.values() for array in pair)]
        digest = hashlib.sha256(repr((self.vocab_size, self.eos, self.order, list(self.pairs))).encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def fit(
        cls,
        stream: Integer[np.ndarray, " tokens"],
        *,
        vocab_size: int,
        eos: int,
        order: int = 5,
        skips: tuple[int, ...] = (1, 2),
        progress: Progress = _SILENT,
    ) -> "NgramTables":
        """Count a stream of documents, each followed by EOS."""
        counts = count(stream, vocab_size=vocab_size, eos=eos, order=order, progress=progress)
        raw = [np.zeros(len(level), dtype=np.int64) for level in counts.levels]
        behind = max(order - 1, *(s + 1 for s in skips), 1)
        start_of_text = np.array([_NONE] * (behind - 1) + [eos])
        pairs = {s: (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)) for s in skips}
        for start in range(0, len(stream), _BLOCK):
            block = stream[max(0, start - behind) : start + _BLOCK].astype(np.int64)[None]
            if start < behind:
                block = np.concatenate([start_of_text[start:][None], block], axis=1)
            for k, (_, node) in enumerate(_walk([level.keys for level in counts.levels], block, vocab_size)):
                raw[k] += np.bincount(node[0, behind:][node[0, behind:] >= 0], minlength=len(raw[k]))
            depth = history_depth(block, eos)
            for s in skips:
                keys = _pair_keys(block, depth, s, vocab_size)[0, behind:]
                pairs[s] = _added(pairs[s], keys[keys >= 0])
        return cls(counts, raw, pairs)

    def frequent(self, num: int) -> Int64[np.ndarray, " _"]:
        """Return the ``num`` most frequent tokens (all if there are fewer); of a tie the smaller id comes first."""
        order = np.argsort(-self.raw[0].astype(np.int64), kind="stable")[:num]
        return self.counts.levels[0].keys[order].astype(np.int64)

    def seen(
        self, strings: Int64[np.ndarray, "R W"], length: int, own: Bool[np.ndarray, "R L"] | None = None
    ) -> Iterator[Seen]:
        """Look up, for k = 1 … n and then each skip, the last ``length`` places of each string.

        −1 in a string is a token that is not known. ``own`` marks places of the training text itself, to be left out.
        """
        V, at, depth = self.vocab_size, slice(strings.shape[1] - length, None), history_depth(strings, self.eos)
        nodes = [(context[:, at], node[:, at]) for context, node in self._walk(strings)]
        counted = [level.look_up(*pair) for level, pair in zip(self._levels, nodes, strict=True)]
        if own is not None:
            begins = [_begins_document(strings, depth, k, self.eos)[:, at] for k in range(1, self.order + 1)]
            counted = without(own, self._levels, nodes, counted, begins)
        prob = np.full((len(strings), length), 1 / V)
        for k, (level, (c, history, a, total, taken)) in enumerate(zip(self._levels, counted, strict=True)):
            mixed = (a - level.D[np.minimum(a, 3)] + taken * prob) / np.maximum(total, 1)
            prob = np.where(total > 0, mixed, prob)
            yield Seen(depth[:, at] >= k, c, history, prob)
        for s, (keys, counts) in self.pairs.items():
            asked = _pair_keys(strings, depth, s, V)[:, at]
            c = np.append(counts, 0)[_find(keys, asked)]
            if own is not None:
                groups = Groups(asked, own & (asked >= 0))
                c = np.maximum(c - groups.spread(groups.size), 0)
            yield Seen(asked >= 0, c, np.zeros_like(c), np.ones(c.shape))

    def _walk(self, strings: Int64[np.ndarray, "R W"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return _walk([level.keys for level in self.counts.levels], strings, self.vocab_size)

    def save(self, path: Path) -> None:
        """Write the counts, completely or not at all."""
        arrays: dict[str, Any] = self.counts.arrays() | {f"raw.{k}": raw for k, raw in enumerate(self.raw, 1)}
        for s, (keys, counts) in self.pairs.items():
            arrays |= {f"pairs.{s}.keys": keys, f"pairs.{s}.counts": counts}
        arrays["sizes"] = np.array([self.vocab_size, self.eos, self.order])
        with atomic_write(path) as aside:
            save_file(arrays, aside)

    @classmethod
    def load(cls, path: Path) -> "NgramTables":
        """Read what ``save`` wrote."""
        try:
            arrays = load_file(path)
            V, eos, order = map(int, arrays["sizes"])
            counts = NgramCounts.from_arrays(arrays, vocab_size=V, eos=eos, order=order)
            raw = [columns(arrays[f"keys.{k}"], arrays[f"raw.{k}"], f"raw.{k}")[1] for k in range(1, order + 1)]
            skips = sorted(int(name.split(".")[1]) for name in arrays if name.endswith(".keys"))
            pairs = {s: columns(arrays[f"pairs.{s}.keys"], arrays[f"pairs.{s}.counts"], f"pairs.{s}") for s in skips}
        except FileNotFoundError:
            raise UserError(f"there is no file {path}: copy the whole folder of the energy") from None
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path} holds no counts of n-grams ({error!r}): train the energy again") from None
        return cls(counts, raw, pairs)


def _added(counted: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add keys to distinct keys and their counts."""
    some, counts = np.unique(keys, return_counts=True)
    both, inverse = np.unique(np.concatenate([counted[0], some]), return_inverse=True)
    return both, np.bincount(inverse, weights=np.concatenate([counted[1], counts])).astype(np.int64)


def history_depth(strings: Int64[np.ndarray, "R W"], eos: int) -> Int64[np.ndarray, "R W"]:
    """Return the length of each place's history: back to EOS, the document's start, or what is known."""
    place = np.arange(strings.shape[1])
    first = np.where(strings == _NONE, place + 1, np.where(strings == eos, place, 0))  # of a history, seen from behind
    first = np.maximum.accumulate(first, axis=1)[:, :-1]
    depth: Int64[np.ndarray, "R W"] = place - np.concatenate([np.zeros_like(strings[:, :1]), first], axis=1)
    return depth


def _walk(
    keys: list[Int64[np.ndarray, " _"]], strings: Int64[np.ndarray, "R W"], V: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, order by order, the node of the k − 1 tokens before each place and of the k tokens that end there."""
    context = np.zeros(strings.shape, dtype=np.int64)
    for level in keys:
        is_missing = (context == _NONE) | (strings == _NONE)
        node = _find(level, np.where(is_missing, _NONE, context * V + strings))
        yield context, node
        # a longer n-gram that ends with EOS has no children, so no context reaches back beyond EOS
        context = np.concatenate([np.full((len(strings), 1), _NONE), node[:, :-1]], axis=1)


def _find(keys: Int64[np.ndarray, " nodes"], asked: Int64[np.ndarray, "R W"]) -> Int64[np.ndarray, "R W"]:
    """Return the number of each key, or −1."""
    if len(keys) == 0:
        return np.full(asked.shape, _NONE)
    few, inverse = np.unique(asked, return_inverse=True)  # in order, the search stays in the processor's cache
    node = np.minimum(np.searchsorted(keys, few), len(keys) - 1)
    found: Int64[np.ndarray, "R W"] = np.where(keys[node] == few, node, _NONE)[inverse].reshape(asked.shape)
    return found


def _pair_keys(
    strings: Int64[np.ndarray, "R W"], depth: Int64[np.ndarray, "R W"], skip: int, V: int
) -> Int64[np.ndarray, "R W"]:
    """Key the pair of each token and the one ``skip`` tokens before its neighbour; −1 where there is none."""
    back = skip + 1
    before = np.concatenate([np.full((len(strings), back), _NONE), strings], axis=1)[:, : strings.shape[1]]
    return np.where((depth >= back) & (strings != _NONE), before * V + strings, _NONE)


def _begins_document(
    strings: Int64[np.ndarray, "R W"], depth: Int64[np.ndarray, "R W"], k: int, eos: int
) -> Bool[np.ndarray, "R W"]:
    """Tell whether the k-gram that ends at each place starts at the start of a document."""
    W = strings.shape[1]
    first = np.concatenate([np.full((len(strings), k - 1), _NONE), strings], axis=1)[:, :W]
    begins: Bool[np.ndarray, "R W"] = (depth == k - 1) & (first == eos) & (k > 1)
    return begins
