"""Perplexity of a language model on held-out windows, per token, word and byte.

    perplexity = exp(H),    H = − Σ_d log P_d / Σ_d n_d

The sums run over documents d: P_d the probability of the continuations in d given their prefixes, n_d their tokens,
words or bytes. H is a ratio of sums, and windows of one document are alike, so its standard error is that of the ratio
over documents (linearised):

    r_d = − log P_d − H · n_d,      se² = D/(D − 1) · Σ_d r_d² / (Σ_d n_d)²

and the interval is exp(H ± t · se) with Student's t for D − 1 degrees of freedom, 95 %, never below one. Perplexity per
token depends on the tokenizer; per word and per byte can be compared between tokenizers. A word is counted where it
begins.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float
from scipy.stats import t as student

from freenergy.corpus import Corpus, Windows, count_words_and_bytes
from freenergy.errors import UserError
from freenergy.progress import Progress
from freenergy.protocols import LanguageModel
from freenergy.randomness import Rng

_BATCH = 32
_CONFIDENCE = 0.95
_MOST_NATS = 700.0


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """A number and its 95 % interval; None where there is nothing to tell it by, or it is beyond all bounds."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return f"{self.value:.4g} ({'no interval' if self.low is None else f'{self.low:.4g} – {self.high:.4g}'})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport:
    """Perplexity three ways, and what it was measured on."""

    token: Measurement
    word: Measurement
    byte: Measurement
    nats_per_window: float
    windows: int
    documents: int
    tokens: int
    split: str

    def to_json(self) -> dict[str, Any]:
        """As JSON-like values."""
        return asdict(self)


def perplexity(
    lm: LanguageModel, corpus: Corpus, split: str, num_windows: int, rng: Rng, progress: Progress
) -> PerplexityReport:
    """Measure on ``num_windows`` windows of a split, chosen by ``rng`` (all of them where there are fewer)."""
    windows = corpus.windows(split)
    if num_windows < 1 or len(windows) < 1:
        raise UserError(f"{num_windows} of {len(windows)} windows of {split} text: measure on at least one")
    chosen = np.sort(rng.permutation(len(windows))[:num_windows].numpy())
    with progress.track(f"perplexity on {split}", len(chosen), "windows") as advance:
        rows = []
        for row in _measured(lm, corpus, windows, chosen):
            rows.append(row)
            advance(1)
    documents = np.unique(windows.documents[chosen], return_inverse=True)[1]
    log_p, tokens, words, size = (np.bincount(documents, column) for column in np.array(rows, dtype=np.float64).T)
    return PerplexityReport(
        token=ratio(log_p, tokens),
        word=ratio(log_p, words),
        byte=ratio(log_p, size),
        nats_per_window=float(-log_p.sum() / len(chosen)),
        windows=len(chosen),
        documents=len(log_p),
        tokens=int(tokens.sum()),
        split=split,
    )


def _measured(
    lm: LanguageModel, corpus: Corpus, windows: Windows, chosen: np.ndarray
) -> Iterator[tuple[float, int, int, int]]:
    """For each window: log-probability, tokens, words and bytes of its continuation."""
    for first in range(0, len(chosen), _BATCH):
        x = windows.continuations(chosen[first : first + _BATCH])
        log_p = lm.log_prob(x)[:, 0].tolist()
        for i, value in enumerate(log_p):
            words, size = count_words_and_bytes(corpus.tokenizer, x[i : i + 1])
            yield value, int(x.lengths[i, 0]), words, size


def ratio(log_p: Float[np.ndarray, " D"], n: Float[np.ndarray, " D"]) -> Measurement:
    """exp(H) with its interval over documents."""
    H, reach = rate(-log_p, n)
    if H is None:
        return Measurement(None, None, None)
    if reach is None:
        return Measurement(bounded_exp(H), None, None)
    # no text has a probability above one, so no interval need reach below a perplexity of one
    return Measurement(bounded_exp(H), bounded_exp(max(H - reach, 0.0)), bounded_exp(H + reach))


def rate(amount: Float[np.ndarray, " D"], n: Float[np.ndarray, " D"]) -> tuple[float | None, float | None]:
    """Σ amount / Σ n over documents, and how far its 95 % interval reaches to both sides; None where nothing tells."""
    D, total = len(amount), n.sum()
    if not total:  # text without spaces may begin no word in any window
        return None, None
    H = float(amount.sum() / total)
    if D < 2:
        return H, None
    r = amount - H * n
    se = math.sqrt(D / (D - 1) * (r**2).sum()) / total
    return H, float(student.ppf((1 + _CONFIDENCE) / 2, D - 1)) * se


def bounded_exp(nats: float) -> float | None:
    """exp, or None where it is no finite number: such a perplexity says nothing, and JSON has no infinity."""
    return math.exp(nats) if nats < _MOST_NATS else None
