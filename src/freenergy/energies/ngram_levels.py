"""Counts at places, and how they fall when a text leaves its own places out.

    a(hw): adjusted count (``base.ngram_counts``),    D: discounts of its order,    δ(u): own places of the k-gram u

Leaving out lowers c(u) by δ(u). Where c falls to zero, the (k−1)-gram behind u loses one of the tokens that it follows,
so its a falls by one. Sums over the children of a context follow.

Legend: R strings, of which L places are asked about.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer

from freenergy.lm.ngram import discounts

_NONE = -1


class Counted(NamedTuple):
    """All that p_k needs at each place."""

    c: Int64[np.ndarray, "R L"]  # c(hw)
    history: Int64[np.ndarray, "R L"]  # c(h·)
    a: Int64[np.ndarray, "R L"]  # a(hw)
    total: Int64[np.ndarray, "R L"]  # a(h·)
    taken: Float64[np.ndarray, "R L"]  # Σ_w D(a(hw))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """All k-grams: sorted keys, and sums over the children of each context. Others end with the entry of node −1."""

    keys: Int64[np.ndarray, " nodes"]
    raw: Int64[np.ndarray, " nodes+1"]
    adjusted: Int64[np.ndarray, " nodes+1"]
    raw_total: Int64[np.ndarray, " contexts"]  # c(h·)
    total: Int64[np.ndarray, " contexts"]  # a(h·)
    taken: Float64[np.ndarray, " contexts"]  # Σ_w D(a(hw))
    D: Float64[np.ndarray, " 4"]

    @classmethod
    def of(cls, keys: np.ndarray, raw: np.ndarray, adjusted: np.ndarray, num_contexts: int, V: int) -> "Level":
        """Build it from the k-grams' keys, counts and adjusted counts, and the number of (k−1)-grams."""
        D, context = discounts(adjusted), keys // V

        def over_children(values: np.ndarray) -> np.ndarray:
            return np.append(np.bincount(context, values, num_contexts), 0)

        taken = over_children(D[np.minimum(adjusted, 3)])
        raw_total, total = (over_children(values).astype(np.int64) for values in (raw, adjusted))
        raw, adjusted = (np.append(values, 0).astype(np.int64) for values in (raw, adjusted))
        return cls(keys, raw, adjusted, raw_total, total, taken, D)

    def look_up(self, context: Int64[np.ndarray, "R L"], node: Int64[np.ndarray, "R L"]) -> Counted:
        """Look up a k-gram and its context."""
        total = (self.raw_total[context], self.total[context], self.taken[context])
        return Counted(self.raw[node], total[0], self.adjusted[node], total[1], total[2])


@final
class Groups:
    """Places of one string that hold the same id."""

    def __init__(self, ids: Int64[np.ndarray, "R L"], valid: Bool[np.ndarray, "R L"]) -> None:
        rows = np.arange(len(ids))[:, None] * (int(ids.max(initial=0)) + 1)
        places = np.flatnonzero(valid)
        _, first, inverse, self.size = np.unique(
            (rows + ids).ravel()[places], return_index=True, return_inverse=True, return_counts=True
        )
        self.first = places[first]  # one place of each group
        self.group = np.full(ids.shape, _NONE)
        self.group.ravel()[places] = inverse

    def spread(self, values: Integer[np.ndarray, " groups"] | Float64[np.ndarray, " groups"]) -> np.ndarray:
        """Return the value of its group at each place; 0 at places without one."""
        spread: np.ndarray = np.append(values, 0)[self.group]
        return spread


def without(
    own: Bool[np.ndarray, "R L"],
    levels: list[Level],
    nodes: list[tuple[np.ndarray, np.ndarray]],
    counted: list[Counted],
    begins: list[Bool[np.ndarray, "R L"]],
) -> list[Counted]:
    """Return the counts of a text that lacks the own places of each string."""
    less: list[Counted] = []
    vanished = np.zeros(0, dtype=np.int64)  # a place of each (k+1)-gram that is gone
    for k in reversed(range(len(levels))):
        (context, node), before, D = nodes[k], counted[k], levels[k].D
        groups = Groups(node, own & (node >= 0))
        fewer = groups.size
        if k + 1 < len(levels):
            behind = groups.group.ravel()[vanished]
            types = np.bincount(behind[behind >= 0], minlength=len(fewer))
            fewer = np.where(begins[k].ravel()[groups.first], fewer, types)
        a_before = before.a.ravel()[groups.first]
        a = np.maximum(a_before - fewer, 0)
        contexts = Groups(context, own & (context >= 0))
        parent = contexts.group.ravel()[groups.first]

        def over_children(values: np.ndarray, parent: np.ndarray = parent, contexts: Groups = contexts) -> np.ndarray:
            return contexts.spread(np.bincount(parent, values, len(contexts.size)))

        gone = over_children(a_before - a).astype(np.int64)
        taken = over_children(D[np.minimum(a_before, 3)] - D[np.minimum(a, 3)])
        less.append(
            Counted(
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
