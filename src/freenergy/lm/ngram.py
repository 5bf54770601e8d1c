"""The n-gram language model: interpolated modified Kneser-Ney smoothing (Chen & Goodman 1998).

    p_k(w | h) = (a(hw) − D_k(a(hw))) / a(h·) + γ(h) · p_{k−1}(w | h′),      p_0(w) = 1 / V
    γ(h) = Σ_w D_k(a(hw)) / a(h·)       the mass that discounting takes, so that Σ_w p_k(w | h) = 1
    D_k(i) = i − (i + 1) · Y · t_{i+1} / t_i,      Y = t_1 / (t_1 + 2 t_2)

h holds k − 1 tokens, h′ is h without its first; a are the adjusted counts of ``ngram_counts``, a(h·) their sum over
the tokens that follow h; t_i is the number of k-grams that have the count i, D_k(3) is for 3 or more. Where h was never
seen, p_k(w | h) = p_{k−1}(w | h′). A context never reaches back beyond the last EOS. An empty one is the start of a
document; a short one without EOS is the middle of a document of which nothing more is known.

Legend: R strings of T tokens, V vocabulary, n order.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Integer
from safetensors.numpy import load_file, save_file
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error, fingerprint, intact, read_json, write_json
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.ngram_counts import NONE, CountLevel, NgramCounts, count, find
from freenergy.lm.ngram_draws import NgramMixture, draw_mixture
from freenergy.lm.stepping import in_chunks, sum_tokens

_ARRAYS, _CONFIG = "ngram.safetensors", "config.json"
_REMEDY = "fit the model again, or copy the whole folder from where it was made"
_FALLBACK = (0.5, 1.0, 1.5)
_NUMBERS = 2**24  # log-probabilities held at once while sampling: 128 MB


def discounts(counts: Integer[np.ndarray, " nodes"]) -> Float64[np.ndarray, " 4"]:
    """Return D(0), D(1), D(2) and D(3 or more) from the adjusted counts of all n-grams of one length.

    A tiny corpus may lack n-grams of count 1, 2, 3 or 4, or give a D(i) outside (0, i]; then half of i is taken. That
    no D is zero gives every token a positive probability.
    """
    t = np.bincount(np.minimum(counts, 5), minlength=6)
    if (t[1:5] > 0).all():
        Y = t[1] / (t[1] + 2 * t[2])
        D = [i - (i + 1) * Y * t[i + 1] / t[i] for i in (1, 2, 3)]
        if all(0 < D[i - 1] <= i for i in (1, 2, 3)):
            return np.array([0.0, *D])
    return np.array([0.0, *_FALLBACK])


class NgramTable(NamedTuple):
    """Order k as it is read: what contexts of k − 1 tokens say of the next; the last entry is that of node −1."""

    keys: Int64[np.ndarray, " nodes"]  # context · V + token, ascending
    direct: Float64[np.ndarray, " nodes+1"]  # (a(hw) − D) / a(h·), and 0
    rest: Float64[np.ndarray, " contexts"]  # γ(h), or 1 where nothing followed h, and 1
    first: Int64[np.ndarray, " contexts"]  # the children of context i are the nodes first[i] … first[i + 1] − 1

    @classmethod
    def smooth(cls, level: CountLevel, num_contexts: int, vocab_size: int) -> "NgramTable":
        """Discount one level of counts."""
        context = level.keys // vocab_size
        taken = discounts(level.counts)[np.minimum(level.counts, 3)]
        total = np.bincount(context, level.counts, num_contexts)
        rest = np.where(total > 0, np.bincount(context, taken, num_contexts) / np.maximum(total, 1), 1.0)
        direct = (level.counts - taken) / total[context]
        first = np.cumsum(np.bincount(context + 1, minlength=num_contexts + 1))
        return cls(level.keys, np.append(direct, 0.0), np.append(rest, 1.0), first)

    def children(self, contexts: Int64[np.ndarray, " R"]) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
        """Find all nodes below the known contexts, each with the row of its context."""
        begin, end = self.first[contexts], self.first[contexts + 1]
        size = np.where(contexts == NONE, 0, end - begin)
        rows = np.repeat(np.arange(len(contexts)), size)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(size) - size, size)
        return rows, begin[rows] + inside


@final
class NgramLM:
    """P_LM(x | c) from counts of n-grams.

    >>> lm = NgramLM.fit(np.array([1, 2, 0, 1, 1, 2, 0]), vocab_size=3, eos=0, order=2)
    >>> lm.next_log_probs(Sequences.from_lists([[], [1]])).argmax(-1).tolist()
    [1, 2]
    """

    kind: ClassVar[str] = "ngram"
    record_keys: ClassVar[tuple[str, ...]] = ("path",)
    draws_here = True

    def __init__(self, counts: NgramCounts, *, tokenizer: str | None = None) -> None:
        self.counts, self.tokenizer, self.max_length = counts, tokenizer, None
        self.vocab_size, self.eos, self.order = counts.vocab_size, counts.eos, counts.order
        sizes = zip(counts.levels, counts.num_contexts, strict=True)
        self.tables = [NgramTable.smooth(level, num, self.vocab_size) for level, num in sizes]
        unigram = self.tables[0]
        self.p1 = np.full(self.vocab_size, unigram.rest[0] / self.vocab_size)
        self.p1[unigram.keys] += unigram.direct[:-1]

    @classmethod
    def fit(
        cls,
        stream: Integer[np.ndarray, " tokens"],
        *,
        vocab_size: int,
        eos: int,
        order: int = 5,
        tokenizer: str | None = None,
        progress: Progress = SILENT,
    ) -> "NgramLM":
        """Count a stream of documents, each followed by EOS; ``tokenizer`` is the fingerprint of what made the ids."""
        counts, _ = count(stream, vocab_size=vocab_size, eos=eos, order=order, progress=progress)
        return cls(counts, tokenizer=tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Return the name of this model, by its content."""
        return _fingerprint(self.counts, self.tokenizer)

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c)."""
        B, N, L = x.tokens.shape
        strings = self.counts.strings(x, self.order - 1)
        p = np.full(strings.shape, 1 / self.vocab_size)
        for table, (context, node) in zip(self.tables, self.counts.walk(strings), strict=True):
            p *= table.rest[context[:, :-1]]
            p += table.direct[node]
        log_p = torch.from_numpy(np.log(p[:, self.order - 1 :]).reshape(B, N, L)).to(x.tokens.device)
        return sum_tokens(log_p, x.mask)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P_LM(v | c) for every token v."""
        return torch.from_numpy(self._next(self._tail(contexts))).to(contexts.tokens.device)

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context.

        Without truncation V probabilities are never formed (``ngram_draws``); tempered and truncated draws, and those
        that a test walks branch by branch, go through them.
        """
        if truncation.is_identity and rng.rows(1, 1, 1).numbers(0) is not None:
            start = np.zeros(len(contexts), dtype=np.int64)  # the node of no tokens
            return draw_mixture(self._mixture, [start, *self.ends(contexts)], contexts, num, space, rng)

        def read(some: slice) -> Callable[[int], _NgramStepper]:
            return lambda count: self.stepper(contexts[some], count, space.length)

        return in_chunks(read, contexts, num, space, rng, truncation, rows=max(1, _NUMBERS // self.vocab_size))

    def stepper(self, contexts: Sequences, num: int, length: int) -> "_NgramStepper":
        """Return a stepper at the start of ``num`` continuations of each context."""
        return _NgramStepper(self, self._tail(contexts), contexts.tokens.device)

    @cached_property
    def _mixture(self) -> NgramMixture:
        return NgramMixture.of(self.tables, self.vocab_size)

    def save_pretrained(self, folder: Path) -> None:
        """Write the counts and then the configuration that names them, so that one never passes for another's."""
        with atomic_write(folder / _ARRAYS) as aside:
            save_file(self.counts.arrays(), aside)
        sizes = {"vocab_size": self.vocab_size, "eos": self.eos, "order": self.order}
        names = {"kind": self.kind, "tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
        write_json(folder / _CONFIG, sizes | names)

    @classmethod
    def from_pretrained(cls, folder: Path) -> "NgramLM":
        """Read what ``save`` wrote."""
        config, path = read_json(folder / _CONFIG), folder / _ARRAYS
        if (kind := config.get("kind")) != cls.kind:
            raise UserError(
                f"{folder / _CONFIG} describes a model of kind {kind!r}: give the folder of an n-gram model"
            )
        with corruption_as_user_error(path, _REMEDY):
            sizes = {name: int(config[name]) for name in ("vocab_size", "eos", "order")}
            counts = NgramCounts.from_arrays(load_file(intact(path)), **sizes)
        tokenizer = config.get("tokenizer")
        if _fingerprint(counts, tokenizer) != config.get("fingerprint"):
            raise UserError(f"{path} is not what {_CONFIG} next to it describes: {_REMEDY}")
        return cls(counts, tokenizer=tokenizer)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the counts into ``folder/base``."""
        self.save_pretrained(folder / "base")
        return {"path": "base"}

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "NgramLM":
        """Load the counts that the record names."""
        return cls.from_pretrained(folder / record["path"])

    def ends(self, contexts: Sequences) -> list[Int64[np.ndarray, " B"]]:
        """Return the nodes of the last 1 … n − 1 tokens of each context, −1 where they were never seen."""
        return [context[:, -1] for context, _ in list(self.counts.walk(self._tail(contexts)))[1:]]

    def ends_after(
        self, ends: Sequence[Int64[np.ndarray, " R"]], tokens: Int64[np.ndarray, " R"]
    ) -> list[Int64[np.ndarray, " R"]]:
        """Return the same once a token of each string has been read."""
        before = [np.zeros_like(tokens), *ends][: len(ends)]
        return [
            find(table.keys, np.where(node == NONE, NONE, node * self.vocab_size + tokens))
            for table, node in zip(self.tables, before, strict=False)
        ]

    def _tail(self, contexts: Sequences) -> Int64[np.ndarray, "B tail"]:
        return self.counts.tail(contexts, self.order - 1)

    def _next(self, tail: Int64[np.ndarray, "R tail"]) -> Float64[np.ndarray, "R V"]:
        """Compute log P of every next token: p_1 times all γ, plus what longer contexts add for tokens they saw."""
        passed = np.ones(len(tail))  # the product of γ over the orders above
        parts = []
        for table, (context, _) in list(zip(self.tables, self.counts.walk(tail), strict=True))[:0:-1]:
            rows, nodes = table.children(context[:, -1])
            cells = rows * self.vocab_size + table.keys[nodes] % self.vocab_size
            parts.append((cells, passed[rows] * table.direct[nodes]))
            passed = passed * table.rest[context[:, -1]]
        p: Float64[np.ndarray, " R*V"] = (passed[:, None] * self.p1).ravel()
        for cells, mass in reversed(parts):
            p[cells] += mass  # the cells of one order are distinct
        np.log(p, out=p)
        return p.reshape(len(tail), self.vocab_size)


@final
class _NgramStepper:
    """Keeps the last n − 1 tokens of each candidate."""

    def __init__(self, lm: NgramLM, tail: Int64[np.ndarray, "B tail"], device: torch.device) -> None:
        self._lm, self._device = lm, device
        self._tail = tail[:, None]  # [B, 1, n − 1], and [B, N, n − 1] after the first step

    def first(self) -> Float[Tensor, "B V"]:
        return torch.from_numpy(self._lm._next(self._tail[:, 0])).to(self._device)

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        B, N = tokens.shape
        new = tokens.cpu().numpy()[:, :, None]
        read = np.concatenate([np.broadcast_to(self._tail, (B, N, self._tail.shape[2])), new], axis=2)
        self._tail = read[:, :, 1:]
        log_p = self._lm._next(self._tail.reshape(B * N, -1))
        return torch.from_numpy(log_p.reshape(B, N, -1)).to(self._device)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        if self._tail.shape[1] > 1:
            self._tail = np.take_along_axis(self._tail, rows.cpu().numpy()[:, :, None], axis=1)


def _fingerprint(counts: NgramCounts, tokenizer: str | None) -> str:
    return fingerprint({"kind": NgramLM.kind, "counts": counts.fingerprint, "tokenizer": tokenizer})
