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
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import stdtrit  # scipy.stats takes a second to import

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Corpus, Tokenizer, count_words_and_bytes

CONFIDENCE = 0.95
UNITS = ("token", "word", "byte")
_BATCH = 32
_MOST_NATS = 700.0


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """A number and its 95 % interval; None where it cannot be estimated, or overflows."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return f"{self.value:.4g} ({'no interval' if self.low is None else f'{self.low:.4g} – {self.high:.4g}'})"

    @property
    def interval(self) -> list[float | None]:
        """Both ends, as JSON has them."""
        return [self.low, self.high]

    def to_json(self) -> list[float | None]:
        """Value, low, high."""
        return [self.value, self.low, self.high]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """What is in each of W windows' own continuations, and the document that it stands in."""

    token: Float[np.ndarray, " W"]
    word: Float[np.ndarray, " W"]
    byte: Float[np.ndarray, " W"]
    documents: Integer[np.ndarray, " W"]

    @classmethod
    def of(cls, x: Continuations, documents: Integer[np.ndarray, " W"], tokenizer: Tokenizer) -> "Counts":
        """Count the first continuation of every window."""
        pairs = [count_words_and_bytes(tokenizer, x[b : b + 1].candidates(slice(0, 1))) for b in range(x.shape[0])]
        words, size = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return cls(x.lengths[:, 0].double().cpu().numpy(), words, size, np.unique(documents, return_inverse=True)[1])

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, some: slice) -> "Counts":
        """Of some windows; their documents keep their numbers."""
        return Counts(self.token[some], self.word[some], self.byte[some], self.documents[some])

    @property
    def num_documents(self) -> int:
        """D."""
        return int(self.documents.max()) + 1 if len(self) else 0

    def by_document(self, values: Float[np.ndarray, " W"]) -> Float[np.ndarray, " D"]:
        """Sums over the windows of each document."""
        return np.bincount(self.documents, values)

    def mean(self, values: Float[np.ndarray, " W"]) -> Measurement:
        """The mean over windows, with its interval over documents."""
        return measured_rate(self.by_document(values), self.by_document(np.ones(len(values))))

    def perplexity(self, log_p: Float[np.ndarray, " W"], unit: str = "token") -> Measurement:
        """exp(H) of a model with these log-probabilities of the windows."""
        return ratio(self.by_document(log_p), self.by_document(getattr(self, unit)))


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

    @classmethod
    def of(cls, log_p: Float[np.ndarray, " W"], counts: Counts, split: str) -> "PerplexityReport":
        """From the log-probability of each window."""
        return cls(
            **{unit: counts.perplexity(log_p, unit) for unit in UNITS},
            nats_per_window=float(-log_p.mean()),
            windows=len(counts),
            documents=counts.num_documents,
            tokens=int(counts.token.sum()),
            split=split,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, with their intervals."""
        by_unit: dict[str, Measurement] = {unit: getattr(self, unit) for unit in UNITS}
        return {
            "perplexity": {unit: found.value for unit, found in by_unit.items()},
            "interval": {unit: found.interval for unit, found in by_unit.items()},
            "nats_per_window": self.nats_per_window,
            "windows": self.windows,
            "documents": self.documents,
            "tokens": self.tokens,
        }


def perplexity(
    lm: LanguageModel, corpus: Corpus, split: str, num_windows: int, rng: Rng, progress: Progress
) -> PerplexityReport:
    """Measure on ``num_windows`` windows of a split, chosen by ``rng`` (all of them where there are fewer)."""
    windows = corpus.windows(split)
    rows = choose_windows(len(windows), num_windows, split, rng)
    x = windows.continuations(rows)
    log_p = np.zeros(len(rows))
    with progress.track(f"perplexity on {split}", len(rows), "windows") as advance:
        for first in range(0, len(rows), _BATCH):
            some = slice(first, first + _BATCH)
            log_p[some] = lm.log_prob(x[some])[:, 0].double().cpu().numpy()
            advance(len(log_p[some]))
    return PerplexityReport.of(log_p, Counts.of(x, windows.documents[rows], corpus.tokenizer), split)


def choose_windows(available: int, wanted: int, split: str, rng: Rng) -> Integer[np.ndarray, " W"]:
    """The numbers of the windows to measure on, ascending."""
    if wanted < 1 or available < 1:
        raise UserError(f"{wanted} of {available} windows of {split} text: measure on at least one")
    return np.sort(rng.permutation(available)[:wanted].numpy())


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
    """Return Σ amount / Σ n over documents, and the reach of its 95 % interval; None where it cannot be estimated."""
    total = n.sum()
    if not total:  # text without spaces may begin no word in any window
        return None, None
    H = float(amount.sum() / total)
    if not math.isfinite(H):  # an estimate of log Z may be infinite
        return None, None
    return H, reach_of((amount - H * n) / total)


def reach_of(moved: Float[np.ndarray, " D"]) -> float | None:
    """The reach of the 95 % interval of a number that document d moves by ``moved[d]``; None for one document."""
    D = len(moved)
    if D < 2:
        return None
    return float(stdtrit(D - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(D / (D - 1) * (moved**2).sum())


def measured_rate(amount: Float[np.ndarray, " D"], n: Float[np.ndarray, " D"]) -> Measurement:
    """The rate and the ends of its interval."""
    H, reach = rate(amount, n)
    return Measurement(H, None, None) if H is None or reach is None else Measurement(H, H - reach, H + reach)


def measured_percent(gain: Float[np.ndarray, " D"], tokens: Float[np.ndarray, " D"]) -> Measurement:
    """How much lower a perplexity is, in percent, from what each document gains in nats."""
    ends = measured_rate(gain, tokens).to_json()
    return Measurement(*(None if end is None else percent_less(end) for end in ends))


def percent_less(nats_a_token: float) -> float | None:
    """How much lower a perplexity is, in percent, when every token is likelier by this many nats."""
    shrunk = bounded_exp(-nats_a_token)
    return None if shrunk is None else 100 * (1 - shrunk)


def bounded_exp(nats: float) -> float | None:
    """Return exp, or None where it overflows: such a perplexity says nothing, and JSON has no infinity."""
    return math.exp(nats) if nats < _MOST_NATS else None
