"""Word classes by exchange: each word moves to the class where the class bigrams become most likely.

    L = Σ_{c,d} φ(N(c, d)) − Σ_c φ(N(c, ·)) − Σ_d φ(N(·, d)),        φ(n) = n log n

L is the log-likelihood of p(w' | w) = p(c' | c) · p(w' | c') up to a constant of the words' own counts (Kneser & Ney
1993; Martin, Liermann & Ney 1998). A move changes two rows and two columns of N, and only where the word has
neighbours. EOS is a class of its own.
"""

from typing import final

import numpy as np
from jaxtyping import Float64, Int64, Integer
from scipy.sparse import csr_matrix

from freenergy.core.errors import UserError
from freenergy.core.progress import SILENT, Progress


@final
class _Exchange:
    """Counts of class bigrams, and the class of every word."""

    def __init__(self, pairs: csr_matrix, classes: Int64[np.ndarray, " V"], num: int) -> None:
        self.after, self.before = pairs, pairs.T.tocsr()
        self.classes, self.num = classes, num
        self.N = self._count()
        self.rows, self.columns = self.N.sum(1), self.N.sum(0)
        total = int(self.rows.sum())
        n = np.arange(total + 1, dtype=np.float64)
        self.phi: Float64[np.ndarray, " total"] = n * np.log(np.maximum(n, 1))

    def _count(self) -> Int64[np.ndarray, "C C"]:
        coo = self.after.tocoo()
        keys = self.classes[coo.row] * self.num + self.classes[coo.col]
        return np.bincount(keys, coo.data, self.num**2).reshape(self.num, self.num).astype(np.int64)

    def likelihood(self) -> float:
        """Return L."""
        phi = self.phi
        return float(phi[self.N].sum() - phi[self.rows].sum() - phi[self.columns].sum())

    def neighbours(self, word: int) -> tuple[Int64[np.ndarray, " C"], Int64[np.ndarray, " C"], int]:
        """Return how often the word is followed by, and follows, each class; without itself, which comes third."""
        found, own = [], 0
        for side in (self.after, self.before):
            span = slice(side.indptr[word], side.indptr[word + 1])
            others, counts = side.indices[span], side.data[span]
            is_self = others == word
            own = int(counts[is_self].sum())
            weights = np.where(is_self, 0, counts)
            found.append(np.bincount(self.classes[others], weights, self.num).astype(np.int64))
        return found[0], found[1], own

    def add(self, word: int, c: int, sign: int, near: tuple[np.ndarray, np.ndarray, int]) -> None:
        """Put a word into a class (sign 1), or take it out (−1)."""
        after, before, own = near
        self.N[c] += sign * after
        self.N[:, c] += sign * before
        self.N[c, c] += sign * own
        self.columns += sign * after
        self.rows += sign * before
        self.rows[c] += sign * (int(after.sum()) + own)
        self.columns[c] += sign * (int(before.sum()) + own)

    def gains(self, near: tuple[np.ndarray, np.ndarray, int]) -> Float64[np.ndarray, " C"]:
        """Return what L gains by putting a word that is in no class into each class, up to a constant."""
        (after, before, own), phi, N = near, self.phi, self.N
        a, b = np.flatnonzero(after), np.flatnonzero(before)
        rows = N[:, a]
        gain = (phi[rows + after[a]] - phi[rows]).sum(1)
        columns = N[b]
        gain += (phi[columns + before[b, None]] - phi[columns]).sum(0)
        # the cell (c, c) gets both sides and the word's own pairs at once
        cell = np.diagonal(N)
        gain += phi[cell + after + before + own] - phi[cell + after] - phi[cell + before] + phi[cell]
        out, into = int(after.sum()) + own, int(before.sum()) + own
        gain -= phi[self.rows + before + out] - phi[self.rows + before]
        gain -= phi[self.columns + after + into] - phi[self.columns + after]
        found: Float64[np.ndarray, " C"] = gain
        return found

    def move(self, word: int) -> bool:
        """Move a word to its best class; returns whether that is another one."""
        c, near = int(self.classes[word]), self.neighbours(word)
        self.add(word, c, -1, near)
        gains = self.gains(near)
        gains[self.num - 1] = -np.inf  # the class of EOS
        best = int(gains.argmax())
        best = best if gains[best] > gains[c] + 1e-9 else c
        self.classes[word] = best
        self.add(word, best, 1, near)
        return best != c


def word_classes(
    stream: Integer[np.ndarray, " T"],
    *,
    vocab_size: int,
    eos: int,
    num_classes: int = 256,
    passes: int = 3,
    progress: Progress = SILENT,
) -> Int64[np.ndarray, " V"]:
    """Return the class 0 … num_classes − 1 of every word; the last is that of EOS.

    Words start spread over the classes by frequency and are visited from the most frequent on, until none moves or the
    passes are used up. A word that was never seen is put to the rarest ones.
    """
    if not 2 <= num_classes <= vocab_size:
        raise UserError(f"num_classes is {num_classes}: take 2 to {vocab_size}, the number of words")
    if passes < 0:
        raise UserError(f"passes is {passes}: take 0 or more")
    text = np.concatenate([[eos], stream]).astype(np.int64)
    pairs = csr_matrix((np.ones(len(text) - 1), (text[:-1], text[1:])), shape=(vocab_size, vocab_size))
    pairs.sum_duplicates()
    pairs.data = pairs.data.astype(np.int64)
    counts = np.bincount(stream, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    order = order[order != eos]
    classes = np.full(vocab_size, num_classes - 1)
    # the most frequent words start alone, the others share what is left in runs of equal frequency
    classes[order] = np.minimum(np.arange(len(order)), num_classes - 2)
    state = _Exchange(pairs, classes, num_classes)
    seen = order[counts[order] > 0]
    with progress.track("word classes", passes * len(seen), "words") as advance:
        for _ in range(passes):
            moved = 0
            for i, word in enumerate(seen):
                moved += state.move(int(word))
                if i % 500 == 499:
                    advance(500)
            if not moved:
                break
    return state.classes
