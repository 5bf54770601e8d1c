"""What a local mix knows of a text: an n-gram model taken apart, and how rare each token is.

    log p_k(v | h) = log p_{k−1}(v | h′) + log γ(h) + g_k(hv)
    g_k(hv) = log(1 + direct(hv) / (γ(h) · p_{k−1}(v | h′)))

in the letters of ``lm.ngram``. γ(h) is the same for every v, so a law that is normalised does not see it, and g_k is 0
wherever v was never seen after h: of the n-gram models of orders 1 … n only the first is dense, and that one is the
same everywhere. g_k(hv) is a number of the n-gram hv, computed once. idf(v) = log((1 + D) / (1 + d(v))) / log(1 + D),
where d(v) of D documents have the token v.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Float64, Int64, Integer
from safetensors.numpy import save_file

from freenergy.core.files import atomic_write, fingerprint, read_arrays
from freenergy.core.progress import SILENT, Progress
from freenergy.lm.ngram import NgramLM, NgramTable
from freenergy.lm.ngram_counts import find

_NGRAM, _DOCUMENTS = "ngram", "documents.safetensors"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    """Order k: the nodes below each context of k − 1 tokens, the last token of each, and its g."""

    table: NgramTable
    tokens: Int64[np.ndarray, " nodes"]
    gain: Float64[np.ndarray, " nodes"]


@final
@dataclass(frozen=True, eq=False)
class LocalCounts:
    """The n-grams of a text, and in how many of its documents each token stands."""

    ngrams: NgramLM
    having: Int64[np.ndarray, " V"]  # documents that have the token
    documents: int

    @classmethod
    def of(
        cls,
        stream: Integer[np.ndarray, " tokens"],
        *,
        vocab_size: int,
        eos: int,
        order: int,
        tokenizer: str | None = None,
        progress: Progress = SILENT,
    ) -> "LocalCounts":
        """Count a stream of documents, each followed by EOS; order 0 or 1 counts single tokens."""
        sizes = {"vocab_size": vocab_size, "eos": eos, "order": max(1, order)}
        ngrams = NgramLM.fit(stream, **sizes, tokenizer=tokenizer, progress=progress)
        ends = np.asarray(stream) == eos
        document = np.cumsum(ends) - ends
        pairs = np.unique(document * vocab_size + stream.astype(np.int64))
        return cls(ngrams, np.bincount(pairs % vocab_size, minlength=vocab_size), int(ends.sum()))

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return self.ngrams.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """Return the name of these counts, by their content."""
        return fingerprint([self.ngrams.fingerprint, self.having.tolist(), self.documents])

    @cached_property
    def idf(self) -> Float64[np.ndarray, " V"]:
        """Return how rare each token is: 0 in every document, 1 in none."""
        most = np.log1p(self.documents)
        rare: np.ndarray = (most - np.log1p(self.having)) / most
        return rare

    @cached_property
    def log_unigram(self) -> Float64[np.ndarray, " V"]:
        """Compute log p_1."""
        log_p: np.ndarray = np.log(self.ngrams.p1)
        return log_p

    @cached_property
    def gains(self) -> tuple[Gains, ...]:
        """Compute g_k of every n-gram of k tokens, for k = 2 … n."""
        V, found = self.vocab_size, []
        shorter, p = self.ngrams.tables[0], self.ngrams.p1[self.ngrams.tables[0].keys]
        suffix = np.zeros(len(p), dtype=np.int64)  # of a single token: the empty string
        for table in self.ngrams.tables[1:]:
            context, token = np.divmod(table.keys, V)
            node = find(shorter.keys, suffix[context] * V + token)
            passed = table.rest[context] * p[node]
            found.append(Gains(table, token, np.log1p(table.direct[:-1] / passed)))
            shorter, suffix, p = table, node, table.direct[:-1] + passed
        return tuple(found)

    def save(self, folder: Path) -> None:
        """Write the counts."""
        self.ngrams.save_pretrained(folder / _NGRAM)
        with atomic_write(folder / _DOCUMENTS) as aside:
            save_file({"having": self.having, "documents": np.array([self.documents])}, aside)

    @classmethod
    def load(cls, folder: Path) -> "LocalCounts":
        """Read what ``save`` wrote."""
        arrays = read_arrays(folder / _DOCUMENTS)
        return cls(NgramLM.from_pretrained(folder / _NGRAM), arrays["having"], int(arrays["documents"][0]))
