"""A hash table of integer keys, in arrays: millions of keys are looked up at once.

    slot(k) = top bits of k · φ,      a key stands in the first free slot from its own on      (linear probing)

Half of the slots or more stay empty, so a look-up ends after one or two probes; a key that is not there ends at the
first empty slot. Keys are compared whole: nothing collides.
"""

from typing import final

import numpy as np
from jaxtyping import Int32, Int64

from freenergy.core.errors import UserError

MISSING = -1
_PHI = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
_EMPTY = np.int64(-1)


@final
class KeyTable:
    """Maps distinct keys ≥ 0 to ``first``, ``first`` + 1, … in their given order.

    >>> KeyTable(np.array([7, 3]), first=10).find(np.array([3, 4, 7])).tolist()
    [11, -1, 10]
    """

    def __init__(self, keys: Int64[np.ndarray, " n"], first: int = 0) -> None:
        if len(keys) and keys.min() < 0:
            raise UserError("a key is negative: keys of patterns count from 0")
        self.keys, self.first = keys.astype(np.int64), first
        bits = max(4, int(2 * len(keys)).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._slots = np.full(1 << bits, _EMPTY)
        self._ids: Int32[np.ndarray, " slots"] = np.full(1 << bits, MISSING, dtype=np.int32)
        self._place()

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Int64[np.ndarray, " m"]) -> Int32[np.ndarray, " m"]:
        """Return the number of each key, −1 where it is not in the table."""
        slot = self._slot(keys)
        there = self._slots[slot]
        found = np.where(there == keys, self._ids[slot], MISSING)
        left = np.flatnonzero((there != keys) & (there != _EMPTY))
        slot = slot[left]
        while len(left):
            slot = (slot + 1) & self._mask
            there, wanted = self._slots[slot], keys[left]
            found[left] = np.where(there == wanted, self._ids[slot], MISSING)
            on = (there != wanted) & (there != _EMPTY)
            left, slot = left[on], slot[on]
        return found

    def _slot(self, keys: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        return ((keys.astype(np.uint64) * _PHI) >> self._shift).astype(np.int64)

    def _place(self) -> None:
        """Put every key into the first free slot; of keys that meet, one stays and the others move on."""
        todo, slot = np.arange(len(self.keys)), self._slot(self.keys)
        while len(todo):
            free = self._slots[slot] == _EMPTY
            self._slots[slot[free]] = self.keys[todo[free]]
            stays = self._slots[slot] == self.keys[todo]
            self._ids[slot[stays]] = self.first + todo[stays]
            todo, slot = todo[~stays], (slot[~stays] + 1) & self._mask
