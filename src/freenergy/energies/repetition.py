"""An energy that is linear in how a continuation repeats its prefix and itself.

    E(x) = −w · z(φ(x)) − b,      φ(x) = Σ_t of what the n-grams that end at place t of x have been before

For n = 1 … 4 φ counts the places whose n-gram stands in the prefix, and those whose n-gram stands earlier in x; then,
for single tokens, places that repeat the token right before, that repeat one of the last 8, 32 or 128, and repetitions
weighted by how rare the token is in the training text, idf(v) = log((T + V) / (c(v) + 1)). They are sums over places,
so that they mean the same for five tokens and for forty; the share of distinct tokens and the length come last. The
base is not needed.

Legend: R = B·N strings, W length of prefix and continuation together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from safetensors.torch import save_file
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_tensors
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.energies.features import FeatureEnergy, read_settings
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit
from freenergy.lm.presets import Shape

ORDER = 4  # n-grams of up to 4 tokens are looked up in the prefix and in x itself
_NEAR = (1, 8, 32, 128)  # tokens back
_COUNTS = "counts.safetensors"
_NONE = -1

NAMES = (
    *(f"{n}-gram: places that repeat the {where}" for n in range(1, ORDER + 1) for where in ("prefix", "continuation")),
    *(f"places that repeat one of the last {near}" for near in _NEAR),
    "Σ idf of tokens of the prefix",
    "Σ idf of tokens of the continuation",
    "share of distinct tokens",
    "length",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionEnergy(EnergySettings):
    """Linear in how a continuation repeats its prefix and itself; 16 weights, for continuations of any length."""

    fit: ClassVar[Fit] = "convex"
    kind: Literal["repetition"] = "repetition"

    def build(self, inputs: BuildInputs) -> "Repetition":
        """Count the tokens of the training text."""
        counts = np.bincount(inputs.corpus.stream("train"), minlength=inputs.base.vocab_size)
        return Repetition(self, torch.from_numpy(counts))

    def num_features(self, base: Shape | None) -> int:
        """Return 16."""
        return len(NAMES)


@final
class Repetition(FeatureEnergy):
    """w · (sums over repetitions); ``counts`` are those of each token in the training text."""

    knows_text = True

    def __init__(self, settings: RepetitionEnergy, counts: Tensor) -> None:
        super().__init__(settings, list(NAMES))
        self.counts = counts.long()

    @property
    def fingerprint(self) -> str:
        """Fingerprint the settings and all counts."""
        return fingerprint([super().fingerprint, self.counts.tolist()])

    @torch.no_grad()
    def features(self, x: Continuations, *, leave_self_out: bool = False) -> Float[Tensor, "B N F"]:
        """Compute φ(x); with ``leave_self_out`` idf is that of a text without the continuation."""
        x = x.trimmed().to("cpu")
        found = np.stack(list(self._columns(x, leave_self_out)), axis=1)
        return torch.from_numpy(found).view(*x.shape, len(NAMES)).to(self.weight.device)

    def _columns(self, x: Continuations, leave_self_out: bool) -> Iterator[Float64[np.ndarray, " R"]]:
        every = list(repeats(x))
        for one in every:
            yield one.in_prefix.sum(1).astype(np.float64)
            yield one.in_x.sum(1).astype(np.float64)
        tokens = every[0]
        distance = np.arange(tokens.ends.shape[1]) - tokens.previous
        for near in _NEAR:
            yield (tokens.ends & (tokens.previous > _NONE) & (distance <= near)).sum(1).astype(np.float64)
        idf = self._idf(x, tokens.ends, leave_self_out)
        yield np.where(tokens.in_prefix, idf, 0.0).sum(1)
        yield np.where(tokens.in_x, idf, 0.0).sum(1)
        length = tokens.ends.sum(1)
        yield (length - tokens.in_x.sum(1)) / np.maximum(length, 1)
        yield length.astype(np.float64)

    def _idf(self, x: Continuations, is_x: Bool[np.ndarray, "R W"], leave_self_out: bool) -> Float64[np.ndarray, "R W"]:
        """Compute idf at each place; the counts without those of x itself where that is training text."""
        tokens = x.joined().tokens.numpy()
        total, V = int(self.counts.sum()), len(self.counts)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
            raise UserError(
                f"token id {int(tokens.max())} is not in the vocabulary of {V}: take the text's own tokenizer"
            )
        counts = self.counts.numpy()[tokens]
        if leave_self_out:
            own = (tokens[:, :, None] == np.where(is_x, tokens, _NONE)[:, None, :]).sum(2)
            counts, total = np.maximum(counts - own, 0), total - is_x.sum(1, keepdims=True)
        idf: Float64[np.ndarray, "R W"] = np.log((total + V) / (counts + 1))
        return idf

    def _save_more(self, folder: Path) -> None:
        save_file({"counts": self.counts}, folder / _COUNTS)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Repetition":
        """Read what ``save_pretrained`` wrote."""
        settings = RepetitionEnergy(**read_settings(Path(folder), "repetition"))
        counts = read_tensors(Path(folder) / _COUNTS)["counts"]
        if len(counts) < base.vocab_size:
            raise UserError(
                f"the energy in {folder} counts {len(counts)} tokens but the base has {base.vocab_size}: give the base "
                "that it was trained with"
            )
        energy = cls(settings, counts)
        energy._restore(Path(folder))
        return energy


class Repeats(NamedTuple):
    """Of one n: places where an n-gram ends in x, and of those that stand in the prefix or earlier in x."""

    ends: Bool[np.ndarray, "R W"]
    in_prefix: Bool[np.ndarray, "R W"]
    in_x: Bool[np.ndarray, "R W"]
    previous: Int64[np.ndarray, "R W"]  # the last place of the same n-gram, or −1


def repeats(x: Continuations, order: int = ORDER) -> Iterator[Repeats]:
    """Find, for n = 1 … order, n-grams of x that occur in the prefix or earlier in x; x is on the CPU."""
    whole = x.joined()
    tokens, W = whole.tokens.numpy(), whole.tokens.shape[1]
    start = x.contexts.lengths.repeat_interleave(x.shape[1]).numpy()[:, None]
    column = np.arange(W)
    is_x = (column >= start) & (column < whole.lengths.numpy()[:, None])
    alone = np.iinfo(np.int64).max - column.astype(np.uint64)  # an id that no other place of the string has
    ids = np.zeros(tokens.shape, dtype=np.uint64)
    for n in range(1, order + 1):
        ids = _mixed(np.roll(ids, 1, axis=1), tokens)
        is_whole = (column >= n - 1) & (column < whole.lengths.numpy()[:, None])
        first, previous = _earlier(np.where(is_whole, ids, alone))
        ends = is_x & is_whole
        yield Repeats(ends, ends & (first < start), ends & (previous >= start), previous)


def _mixed(before: np.ndarray, tokens: Int64[np.ndarray, "R W"]) -> np.ndarray:
    """Return a 64-bit name of an n-gram from that of its first n − 1 tokens.

    Names are compared inside one string only: among some hundred tokens two n-grams share one in 10^−15 of strings.
    """
    h = (before + np.uint64(0x9E3779B97F4A7C15)) ^ (tokens.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93))
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed: np.ndarray = h ^ (h >> np.uint64(32))
    return mixed


def _earlier(ids: np.ndarray) -> tuple[Int64[np.ndarray, "R W"], Int64[np.ndarray, "R W"]]:
    """Find, for each place, the first place with the same id (itself if none) and the previous one (or −1)."""
    order = np.argsort(ids, axis=1, kind="stable")
    ranked = np.take_along_axis(ids, order, axis=1)
    is_same = np.concatenate([np.zeros((len(ids), 1), dtype=bool), ranked[:, 1:] == ranked[:, :-1]], axis=1)
    head = np.maximum.accumulate(np.where(is_same, 0, np.arange(ids.shape[1])), axis=1)
    first, previous = np.empty_like(order), np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, head, axis=1), axis=1)
    behind = np.concatenate([np.full((len(ids), 1), _NONE), order[:, :-1]], axis=1)
    np.put_along_axis(previous, order, np.where(is_same, behind, _NONE), axis=1)
    return first, previous
