"""An energy that is log-linear in counts of n-grams.

    E(x) = −w · z(φ(x)) − b,      φ(x) = Σ_t of what is known of the n-grams that end at place t of x

φ holds, for n = 1 … order and for pairs with a gap: how many places have an n-gram that the training text has never,
once, twice, … more than 256 times; Σ_t log(1 + c); Σ_t log((c(hw) + 0.1) / (c(h·) + 1)); and Σ_t log p_n(x_t | h) of an
interpolated Kneser-Ney model of order n (``ngram_tables``). It also counts the n-grams of x that the prefix has, those
that x has had before, and the places of each of the text's most frequent tokens. The context is history; a place whose
history is too short for an n-gram counts nowhere for it. The base is not needed.

Legend: R = B·N strings, L continuation length, F features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.energies.features import FeatureEnergy, read_settings
from freenergy.energies.ngram_tables import NgramTables, Seen
from freenergy.energies.repetition import ORDER, repeats
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit
from freenergy.lm.presets import Shape

_TABLES = "tables.safetensors"
_BOUNDS = np.array([1, 2, 3, 5, 9, 17, 65, 257])  # where the buckets of counts begin, after the bucket of 0
_BUCKETS = ("0", "1", "2", "3–4", "5–8", "9–16", "17–64", "65–256", "over 256")
_PLACES = 1 << 21  # of strings that are looked up at once
_NONE = -1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NgramEnergy(EnergySettings):
    """Log-linear in counts of n-grams and skip-grams: in the training text, in the prefix, in the continuation."""

    fit: ClassVar[Fit] = "convex"
    kind: Literal["ngram"] = "ngram"
    order: int = 5
    skips: tuple[int, ...] = (1, 2)  # tokens left out between the two of a skip-gram
    lexicon: int = 256  # the most frequent tokens of the training text, which have a weight each

    def __post_init__(self) -> None:
        check_range(self, "order", at_least=1, at_most=8)
        check_range(self, "lexicon", at_least=0, hint=" tokens that have a weight each")
        if len(set(self.skips)) < len(self.skips) or any(not 1 <= skip <= 16 for skip in self.skips):
            raise UserError(f"skips is {list(self.skips)}: give different numbers from 1 to 16, or none")

    def build(self, inputs: BuildInputs) -> "NgramFeatures":
        """Count the training text."""
        stream, base, progress = inputs.corpus.stream("train"), inputs.base, inputs.progress
        progress.say(f"counting n-grams of {len(stream):,} tokens")
        sizes = {"vocab_size": base.vocab_size, "eos": base.eos, "order": self.order}
        return NgramFeatures(self, NgramTables.fit(stream, **sizes, skips=self.skips, progress=progress))

    def num_features(self, base: Shape | None) -> int:
        """Return how many sums over counts there are."""
        return len(count_names(self)) + self.lexicon


@final
class NgramFeatures(FeatureEnergy):
    """w · (sums over counts of n-grams)."""

    knows_text = True

    def __init__(self, settings: NgramEnergy, tables: NgramTables) -> None:
        if tables.order != settings.order or tuple(tables.pairs) != tuple(sorted(settings.skips)):
            raise UserError(
                f"the counts are of order {tables.order} with skips {tuple(tables.pairs)} but the energy asks for "
                f"{settings.order} with {settings.skips}: count again with the energy's settings"
            )
        self.lexicon = tables.frequent(settings.lexicon)
        super().__init__(settings, count_names(settings) + [f"token {token}: places" for token in self.lexicon])
        self.tables = tables

    @property
    def fingerprint(self) -> str:
        """Fingerprint the settings and all counts."""
        return fingerprint([super().fingerprint, self.tables.fingerprint])

    @torch.no_grad()
    def features(self, x: Continuations, *, leave_self_out: bool = False) -> Float[Tensor, "B N F"]:
        """Compute φ(x); with ``leave_self_out`` from the counts of a text without the continuation of this window.

        What is left out are the n-grams that end in the continuation, as far back as the context is given.
        """
        B, N = x.shape
        x = x.trimmed().to("cpu")
        contexts = max(1, _PLACES // max(1, N * (x.contexts.tokens.shape[1] + x.tokens.shape[2])))
        parts = [self._features(x[b : b + contexts], leave_self_out) for b in range(0, B, contexts)]
        found = np.concatenate(parts) if parts else np.zeros((0, len(self.names)))
        return torch.from_numpy(found).view(B, N, len(self.names)).to(self.weight.device)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "NgramFeatures":
        """Read what ``save_pretrained`` wrote."""
        settings = NgramEnergy(**read_settings(Path(folder), "ngram"))
        tables = NgramTables.load(Path(folder) / _TABLES)
        if tables.vocab_size != base.vocab_size or tables.eos != base.eos:
            raise UserError(
                f"the energy in {folder} counts {tables.vocab_size} tokens with EOS {tables.eos} but the base has "
                f"{base.vocab_size} with EOS {base.eos}: give the base that it was trained with"
            )
        energy = cls(settings, tables)
        energy._restore(Path(folder))
        return energy

    def _save_more(self, folder: Path) -> None:
        self.tables.save(folder / _TABLES)

    def _features(self, x: Continuations, leave_self_out: bool) -> Float64[np.ndarray, "R F"]:
        mask = x.mask.flatten(0, 1).numpy()
        length = mask.sum(1)
        strings = self.tables.strings(x)
        seen = self.tables.seen(strings, mask.shape[1], mask if leave_self_out else None)
        columns: list[Float64[np.ndarray, " R"]] = []
        for k, one in enumerate(seen, 1):
            columns += _count_columns(one, mask, has_history=2 <= k <= self.tables.order)
            if k <= self.tables.order:
                log_p = np.where(mask, np.log(one.prob), 0.0)
                columns += [log_p.sum(1), log_p.min(1, initial=0.0)]
        columns += _repeat_columns(x, mask)
        columns.append(length.astype(np.float64))
        tokens = strings[:, strings.shape[1] - mask.shape[1] :]
        return np.concatenate([np.stack(columns, axis=1), self._places_of_tokens(tokens)], axis=1)

    def _places_of_tokens(self, tokens: Int64[np.ndarray, "R L"]) -> Float64[np.ndarray, "R lexicon"]:
        """Return how often each token of the lexicon occurs in each continuation; −1 is not a token."""
        R, num = len(tokens), len(self.lexicon)
        column = np.full(self.tables.vocab_size + 1, num)  # the last entry is that of −1
        column[self.lexicon] = np.arange(num)
        cell = column[tokens] + (num + 1) * np.arange(R)[:, None]
        return np.bincount(cell.ravel(), minlength=R * (num + 1)).reshape(R, num + 1)[:, :num].astype(np.float64)


def count_names(settings: NgramEnergy) -> list[str]:
    """Name the features, except those of the lexicon."""
    names: list[str] = []
    for kind in [f"{k}-gram" for k in range(1, settings.order + 1)] + [f"skip-{s}" for s in sorted(settings.skips)]:
        names += [f"{kind}: places seen {bucket} times" for bucket in _BUCKETS] + [f"{kind}: Σ log(1 + count)"]
        if kind.endswith("gram"):
            names += [f"{kind}: Σ log share of history"] if kind != "1-gram" else []
            names += [f"{kind}: Σ log p", f"{kind}: least log p"]
    for n in range(1, ORDER + 1):
        names += [f"{n}-gram: places that repeat the prefix", f"{n}-gram: places that repeat the continuation"]
    return [*names, "share of distinct tokens", "length"]


def _count_columns(
    seen: Seen, mask: Bool[np.ndarray, "R L"], *, has_history: bool
) -> Iterator[Float64[np.ndarray, " R"]]:
    """Yield, for one kind of n-gram, buckets of counts, Σ log(1 + c), and the share of the history if any."""
    counts = mask & seen.is_known
    R, num = len(mask), len(_BUCKETS)
    bucket = np.searchsorted(_BOUNDS, seen.c, side="right") + num * np.arange(R)[:, None]
    histogram = np.bincount(bucket[counts], minlength=R * num).reshape(R, num)
    yield from histogram.T.astype(np.float64)
    yield np.where(counts, np.log1p(seen.c), 0.0).sum(1)
    if has_history:
        yield np.where(counts, np.log((seen.c + 0.1) / (seen.history + 1)), 0.0).sum(1)


def _repeat_columns(x: Continuations, mask: Bool[np.ndarray, "R L"]) -> Iterator[Float64[np.ndarray, " R"]]:
    """Count, for n = 1 … 4, n-grams of x that occur in the prefix or earlier in x; then the distinct tokens."""
    every = list(repeats(x))
    for one in every:
        yield one.in_prefix.sum(1).astype(np.float64)
        yield one.in_x.sum(1).astype(np.float64)
    yield (every[0].ends & ~every[0].in_x).sum(1) / np.maximum(mask.sum(1), 1)
