"""Counts of n-grams and skip-grams of a text, and what they say of places in another.

    c(hw): how often hw occurs,      a(hw): its adjusted count (``lm.ngram_counts``),      p_0 = 1 / V
    p_k(w | h) = (a(hw) − D_k(a(hw))) / a(h·) + γ(h) · p_{k−1}(w | h′),      γ(h) = Σ_w D_k(a(hw)) / a(h·)

Own text finds itself: to a window of the training text each of its n-grams has been seen. ``own`` leaves a window's own
continuation out: c(u) falls by the own places of the k-gram u; where it falls to zero, the (k−1)-gram behind u loses
one of the tokens that it follows, so its a falls by one. Sums over the children of a context follow. All of p_k follows
exactly, but for D_k, which is a property of the whole text.

Legend: R strings of W tokens, of which the last L are the places that are asked about; order n.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer
from safetensors.numpy import load_file, save_file

from freenergy.core.files import atomic_write, corruption_as_user_error, intact
from freenergy.core.progress import SILENT, Progress
from freenergy.core.sequences import Continuations
from freenergy.lm.ngram import discounts
from freenergy.lm.ngram_counts import NONE, NgramCounts, columns, count, find

_BLOCK = 1 << 18  # places of the text that are looked up at once


class Seen(NamedTuple):
    """What the text says of each place: of the k-gram (or skip-gram) that ends there."""

    is_known: Bool[np.ndarray, "R L"]  # enough history, inside one document
    c: Int64[np.ndarray, "R L"]  # c(hw)
    history: Int64[np.ndarray, "R L"]  # c(h·)
    prob: Float64[np.ndarray, "R L"]  # p_k(w | h) with the history that there is; ones for skip-grams


class _Counted(NamedTuple):
    """All that p_k needs at each place."""

    c: Int64[np.ndarray, "R L"]  # c(hw)
    history: Int64[np.ndarray, "R L"]  # c(h·)
    a: Int64[np.ndarray, "R L"]  # a(hw)
    total: Int64[np.ndarray, "R L"]  # a(h·)
    taken: Float64[np.ndarray, "R L"]  # Σ_w D(a(hw))


class _Level(NamedTuple):
    """Counts of all k-grams, and sums over the children of each context; they end with the entry of node −1."""

    raw: Int64[np.ndarray, " nodes"]
    adjusted: Int64[np.ndarray, " nodes"]
    raw_total: Int64[np.ndarray, " contexts"]  # c(h·)
    total: Int64[np.ndarray, " contexts"]  # a(h·)
    taken: Float64[np.ndarray, " contexts"]  # Σ_w D(a(hw))
    D: Float64[np.ndarray, " 4"]

    @classmethod
    def of(cls, keys: np.ndarray, raw: np.ndarray, adjusted: np.ndarray, num_contexts: int, V: int) -> "_Level":
        """Build it from the k-grams' keys, counts and adjusted counts, and the number of (k−1)-grams."""
        D, context = discounts(adjusted), keys // V

        def over_children(values: np.ndarray) -> np.ndarray:
            return np.append(np.bincount(context, values, num_contexts), 0)

        taken = over_children(D[np.minimum(adjusted, 3)])
        raw_total, total = (over_children(values).astype(np.int64) for values in (raw, adjusted))
        raw, adjusted = (np.append(values, 0).astype(np.int64) for values in (raw, adjusted))
        return cls(raw, adjusted, raw_total, total, taken, D)

    def look_up(self, context: Int64[np.ndarray, "R L"], node: Int64[np.ndarray, "R L"]) -> _Counted:
        c, a = self.raw[node], self.adjusted[node]
        return _Counted(c, self.raw_total[context], a, self.total[context], self.taken[context])


@final
class _Groups:
    """Places of one string that hold the same id."""

    def __init__(self, ids: Int64[np.ndarray, "R L"], valid: Bool[np.ndarray, "R L"]) -> None:
        rows = np.arange(len(ids))[:, None] * (int(ids.max(initial=0)) + 1)
        places = np.flatnonzero(valid)
        _, first, inverse, self.size = np.unique(
            (rows + ids).ravel()[places], return_index=True, return_inverse=True, return_counts=True
        )
        self.first = places[first]  # one place of each group
        self.group = np.full(ids.shape, NONE)
        self.group.ravel()[places] = inverse

    def spread(self, values: Integer[np.ndarray, " groups"] | Float64[np.ndarray, " groups"]) -> np.ndarray:
        """Return the value of its group at each place; 0 at places without one."""
        spread: np.ndarray = np.append(values, 0)[self.group]
        return spread


@final
class NgramTables:
    """Counts of all n-grams of 1 … n tokens and of pairs with a gap, ready to be asked about many places at once."""

    def __init__(
        self, counts: NgramCounts, raw: list[Integer[np.ndarray, " _"]], pairs: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self.counts, self.raw, self.pairs = counts, raw, dict(sorted(pairs.items()))
        self.vocab_size, self.eos, self.order = counts.vocab_size, counts.eos, counts.order
        self._levels = [
            _Level.of(level.keys, seen, level.counts, size, self.vocab_size)
            for level, seen, size in zip(counts.levels, raw, counts.num_contexts, strict=True)
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
        progress: Progress = SILENT,
    ) -> "NgramTables":
        """Count a stream of documents, each followed by EOS."""
        counts, raw = count(stream, vocab_size=vocab_size, eos=eos, order=order, progress=progress)
        behind = max((s + 1 for s in skips), default=1)
        pairs = {s: (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)) for s in skips}
        for start in range(0, len(stream), _BLOCK):
            block = stream[max(0, start - behind) : start + _BLOCK].astype(np.int64)
            block = np.concatenate([np.full(max(0, behind - start), eos), block])[None]
            depth = history_depth(block, eos)
            for s in skips:
                keys = _pair_keys(block, depth, s, vocab_size)[0, behind:]
                pairs[s] = _added(pairs[s], keys[keys >= 0])
        return cls(counts, raw, pairs)

    def frequent(self, num: int) -> Int64[np.ndarray, " _"]:
        """Return the ``num`` most frequent tokens (all if there are fewer); of a tie the smaller id comes first."""
        order = np.argsort(-self.raw[0].astype(np.int64), kind="stable")[:num]
        return self.counts.levels[0].keys[order].astype(np.int64)

    def strings(self, x: Continuations) -> Int64[np.ndarray, "R W"]:
        """Return the continuations, each after as much of its context as an n-gram can reach."""
        return self.counts.strings(x, max(self.order - 1, *(s + 1 for s in self.pairs), 1))

    def seen(
        self, strings: Int64[np.ndarray, "R W"], length: int, own: Bool[np.ndarray, "R L"] | None = None
    ) -> Iterator[Seen]:
        """Look up, for k = 1 … n and then each skip, the last ``length`` places of each string.

        −1 in a string is a token that is not known. ``own`` marks places of the training text itself, to be left out.
        """
        V, at, depth = self.vocab_size, slice(strings.shape[1] - length, None), history_depth(strings, self.eos)
        nodes = [(context[:, :-1][:, at], node[:, at]) for context, node in self.counts.walk(strings)]
        counted = [level.look_up(*pair) for level, pair in zip(self._levels, nodes, strict=True)]
        if own is not None:
            begins = [_begins_document(strings, depth, k, self.eos)[:, at] for k in range(1, self.order + 1)]
            counted = _without(own, self._levels, nodes, counted, begins)
        prob = np.full((len(strings), length), 1 / V)
        for k, (level, (c, history, a, total, taken)) in enumerate(zip(self._levels, counted, strict=True)):
            mixed = (a - level.D[np.minimum(a, 3)] + taken * prob) / np.maximum(total, 1)
            prob = np.where(total > 0, mixed, prob)
            yield Seen(depth[:, at] >= k, c, history, prob)
        for s, (keys, counts) in self.pairs.items():
            asked = _pair_keys(strings, depth, s, V)[:, at]
            c = np.append(counts, 0)[find(keys, asked)]
            if own is not None:
                groups = _Groups(asked, own & (asked >= 0))
                c = np.maximum(c - groups.spread(groups.size), 0)
            yield Seen(asked >= 0, c, np.zeros_like(c), np.ones(c.shape))

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
        with corruption_as_user_error(path, "copy the whole folder of the energy, or train the energy again"):
            arrays = load_file(intact(path))
            V, eos, order = map(int, arrays["sizes"])
            counts = NgramCounts.from_arrays(arrays, vocab_size=V, eos=eos, order=order)
            raw = [columns(arrays[f"keys.{k}"], arrays[f"raw.{k}"], f"raw.{k}")[1] for k in range(1, order + 1)]
            skips = sorted(int(name.split(".")[1]) for name in arrays if name.endswith(".keys"))
            pairs = {s: columns(arrays[f"pairs.{s}.keys"], arrays[f"pairs.{s}.counts"], f"pairs.{s}") for s in skips}
        return cls(counts, raw, pairs)


def _without(
    own: Bool[np.ndarray, "R L"],
    levels: list[_Level],
    nodes: list[tuple[np.ndarray, np.ndarray]],
    counted: list[_Counted],
    begins: list[Bool[np.ndarray, "R L"]],
) -> list[_Counted]:
    """Return the counts of a text that lacks the own places of each string."""
    less: list[_Counted] = []
    vanished = np.zeros(0, dtype=np.int64)  # a place of each (k+1)-gram that is gone
    for k in reversed(range(len(levels))):
        (context, node), before, D = nodes[k], counted[k], levels[k].D
        groups = _Groups(node, own & (node >= 0))
        fewer = groups.size
        if k + 1 < len(levels):
            behind = groups.group.ravel()[vanished]
            types = np.bincount(behind[behind >= 0], minlength=len(fewer))
            fewer = np.where(begins[k].ravel()[groups.first], fewer, types)
        a_before = before.a.ravel()[groups.first]
        a = np.maximum(a_before - fewer, 0)
        contexts = _Groups(context, own & (context >= 0))
        parent = contexts.group.ravel()[groups.first]

        def over_children(values: np.ndarray, parent: np.ndarray = parent, contexts: _Groups = contexts) -> np.ndarray:
            return contexts.spread(np.bincount(parent, values, len(contexts.size)))

        gone = over_children(a_before - a).astype(np.int64)
        taken = over_children(D[np.minimum(a_before, 3)] - D[np.minimum(a, 3)])
        less.append(
            _Counted(
                np.maximum(before.c - groups.spread(groups.size), 0),
                np.maximum(before.history - contexts.spread(contexts.size), 0),
                np.where(groups.group >= 0, groups.spread(a), before.a),
                before.total - gone,
                np.maximum(before.taken - taken, 0.0),
            )
        )
        is_gone = before.c.ravel()[groups.first] <= groups.size
        vanished = groups.first[is_gone]
    return less[::-1]


def _added(counted: tuple[np.ndarray, np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add keys to distinct keys and their counts."""
    some, counts = np.unique(keys, return_counts=True)
    both, inverse = np.unique(np.concatenate([counted[0], some]), return_inverse=True)
    return both, np.bincount(inverse, weights=np.concatenate([counted[1], counts])).astype(np.int64)


def history_depth(strings: Int64[np.ndarray, "R W"], eos: int) -> Int64[np.ndarray, "R W"]:
    """Return the length of each place's history: back to EOS, the document's start, or what is known."""
    place = np.arange(strings.shape[1])
    first = np.where(strings == NONE, place + 1, np.where(strings == eos, place, 0))  # of a history, seen from behind
    first = np.maximum.accumulate(first, axis=1)[:, :-1]
    depth: Int64[np.ndarray, "R W"] = place - np.concatenate([np.zeros_like(strings[:, :1]), first], axis=1)
    return depth


def _pair_keys(
    strings: Int64[np.ndarray, "R W"], depth: Int64[np.ndarray, "R W"], skip: int, V: int
) -> Int64[np.ndarray, "R W"]:
    """Key the pair of each token and the one ``skip`` tokens before its neighbour; −1 where there is none."""
    back = skip + 1
    before = np.concatenate([np.full((len(strings), back), NONE), strings], axis=1)[:, : strings.shape[1]]
    return np.where((depth >= back) & (strings != NONE), before * V + strings, NONE)


def _begins_document(
    strings: Int64[np.ndarray, "R W"], depth: Int64[np.ndarray, "R W"], k: int, eos: int
) -> Bool[np.ndarray, "R W"]:
    """Tell whether the k-gram that ends at each place starts at the start of a document."""
    W = strings.shape[1]
    first = np.concatenate([np.full((len(strings), k - 1), NONE), strings], axis=1)[:, :W]
    begins: Bool[np.ndarray, "R W"] = (depth == k - 1) & (first == eos) & (k > 1)
    return begins
