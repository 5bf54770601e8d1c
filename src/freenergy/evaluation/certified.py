"""What a residual model gains over its base on held-out text: optimistic, conservative and for sure.

    log P(x) = log P_LM(x) − E(x) − log Z        log Z from the n − 1 draws of the window (``partition``)
    lower:     log Z by T_n, in expectation too low, so the perplexity is too good
    upper:     log Z by Eq. 4 of Deng et al. (2020), too high where its diagnostics are good
    certified: log Z by log[(w(x) + Σ_{i<n} w_i) / n], the true text x among the candidates

    g = log P_certified(x) − log P_LM(x),     G = Σ_d g_d / Σ_d t_d nats per token,     percent = 100 · (1 − exp(−G))

In expectation the certified perplexity is an upper bound on that of the text which importance resampling with n
candidates emits, at every n (``partition.certificate``). g is the difference of residual model and base on the same
window, so its interval over documents d (of t_d tokens) is a paired one. With w = exp(−E) no g is above log n: few
candidates certify little. (Draws of another law q have no such ceiling: there it is the gain over q that log n bounds.)

Chunk by chunk, the certificate of a window is the sum over its chunks k of m tokens, each given the true past,

    log P(x | c) = Σ_k log P(x_k | c x_1 … x_{k−1}) ≥ Σ_k (log P_LM(x_k | …) + g_k),        ceiling (L/m) · log n

It is that of writing chunk by chunk, where one of n draws of m tokens is kept each time. The rows are then chunks.

Scores are ``Scored`` [W, n], the true continuation first. Of a window's n candidates nothing is needed but
``WindowNumbers``: chunks of windows are reduced to these one by one, so that memory holds the candidates of a chunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.scored import Scored
from freenergy.corpus import Windows
from freenergy.evaluation.perplexity import UNITS, Counts, Measurement, measured_percent, measured_rate, percent_less
from freenergy.partition import LogPartition, log_partition

BOUNDS = ("lower", "upper", "certified")
_NEAR_CEILING = 0.8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualReport:
    """Base and residual model on the same windows."""

    perplexity: dict[str, dict[str, Measurement]]  # unit → bound → number
    base: Measurement  # per token
    nats_per_sequence: Measurement  # the certified gain
    percent: Measurement  # less perplexity than the base, for sure
    ceiling_percent: float | None  # what log n nats per sequence would be; None where draws are not the base's own
    log_partition: dict[str, float | None]  # means over windows; None where one is infinite
    ess: float  # mean effective number of the n − 1 draws
    largest_share: float  # mean share of the heaviest draw
    k_hat: float | None  # mean over the windows that have a tail; None where one is infinite
    nce_accuracy: float  # of E < 0 for real text and E > 0 for draws, each half
    pair_accuracy: float
    draws: int  # n − 1
    windows: int
    documents: int
    sampler: str  # whose text has the certified perplexity
    verdict: str  # what to be wary of; empty where there is nothing
    doubt: str  # why log Z and the estimates by it are not to be believed: the certificate does not need them

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, with their intervals."""
        values = {unit: {name: found.value for name, found in by.items()} for unit, by in self.perplexity.items()}
        return {
            "perplexity": values["token"],
            "interval": {name: found.interval for name, found in self.perplexity["token"].items()},
            "per_word": values["word"],
            "per_byte": values["byte"],
            "base_perplexity": self.base.value,
            "base_interval": self.base.interval,
            "gain": {
                "nats_per_sequence": self.nats_per_sequence.value,
                "nats_interval": self.nats_per_sequence.interval,
                "percent": self.percent.value,
                "interval": self.percent.interval,
                "ceiling_percent": self.ceiling_percent,
            },
            **{name: getattr(self, name) for name in _PLAIN},
        }


_PLAIN = (
    "log_partition", "ess", "largest_share", "k_hat", "nce_accuracy", "pair_accuracy", "draws", "windows", "documents",
    "sampler", "verdict", "doubt",
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """Says that rows are chunks of ``size`` tokens, and which of them are the first of their window."""

    size: int
    are_first: Bool[np.ndarray, " W"]

    @classmethod
    def of(cls, windows: Windows, rows: Integer[np.ndarray, " W"]) -> "ChunkRows | None":
        """Return how these rows are chunks; None where they are whole windows."""
        return None if windows.chunks is None else cls(int(windows.chunks.sizes[0]), windows.are_first(rows))

    def summed(self, values: Float[np.ndarray, " W"]) -> Float[np.ndarray, " windows"]:
        """Return the sums over the chunks of each window."""
        return np.add.reduceat(values, self.are_first.nonzero()[0])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowNumbers:
    """What is kept of W windows once their candidates were seen; float64."""

    log_base: Float[Tensor, " W"]  # of the true continuations
    energy: Float[Tensor, " W"]
    log_p: dict[str, Float[Tensor, " W"]]  # by bound
    Z: LogPartition
    draws_above: Float[Tensor, " W"]  # draws with E > 0; E = 0 is a half
    pairs_won: Float[Tensor, " W"]  # draws with more energy than the true continuation; as much is a half
    draws: int  # n − 1
    are_own: bool  # the draws are the base's

    @classmethod
    def of(cls, scores: Scored) -> "WindowNumbers":
        """Reduce W windows with n candidates each."""
        check_draws(scores.num - 1)
        Z, real, drawn = log_partition(scores.log_weight[:, 1:]), scores.energy[:, :1], scores.energy[:, 1:]
        return cls(
            log_base=scores.log_base[:, 0].clone(),  # a view would keep the candidates
            energy=real[:, 0].clone(),
            log_p=log_probs_of_data(scores, Z),
            Z=Z,
            draws_above=_below(-drawn, torch.zeros_like(real)).sum(1),
            pairs_won=_below(real, drawn).sum(1),
            draws=scores.num - 1,
            are_own=scores.truncation.is_identity,
        )

    @staticmethod
    def cat(parts: "Sequence[WindowNumbers]") -> "WindowNumbers":
        """Other windows with as many candidates, one after the other."""
        plain = ("log_base", "energy", "draws_above", "pairs_won")
        return WindowNumbers(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in plain},
            log_p={bound: torch.cat([part.log_p[bound] for part in parts]) for bound in BOUNDS},
            Z=LogPartition.cat([part.Z for part in parts]),
            draws=parts[0].draws,
            are_own=parts[0].are_own,
        )


def residual_report(found: WindowNumbers, counts: Counts, chunks: ChunkRows | None = None) -> ResidualReport:
    """Report on W windows, or on their chunks, from what was kept of them; ``counts`` are of the true text."""
    most, Z = math.log(found.draws + 1) if found.are_own else math.inf, found.Z
    are_first = np.ones(len(counts)) if chunks is None else chunks.are_first.astype(np.float64)
    sampler = sampler_words(found.draws + 1, None if chunks is None else chunks.size)
    log_p = {name: values.numpy() for name, values in found.log_p.items()}
    base = found.log_base.numpy()
    gain, t = counts.by_document(log_p["certified"] - base), counts.by_document(counts.token)
    nats = measured_rate(gain, counts.by_document(are_first))
    pairs = len(counts) * found.draws
    real_below = _below(found.energy, torch.zeros_like(found.energy)).mean().item()
    return ResidualReport(
        perplexity={unit: {name: counts.perplexity(log_p[name], unit) for name in BOUNDS} for unit in UNITS},
        base=counts.perplexity(base),
        nats_per_sequence=nats,
        percent=measured_percent(gain, t),
        ceiling_percent=None if most == math.inf else percent_less(most * len(counts) / t.sum()),
        log_partition={name: _mean(getattr(Z, name)) for name in ("lower", "upper", "jackknife", "standard_error")},
        ess=Z.ess.mean().item(),
        largest_share=Z.largest_share.mean().item(),
        k_hat=_mean(Z.k_hat[Z.k_hat > -math.inf]),  # an infinite one must not be left out: it is the worst
        nce_accuracy=(real_below + found.draws_above.sum().item() / pairs) / 2,
        pair_accuracy=found.pairs_won.sum().item() / pairs,
        draws=found.draws,
        windows=int(are_first.sum()),
        documents=counts.num_documents,
        sampler=sampler,
        verdict=gain_note(nats, most * len(counts) / are_first.sum(), found.draws + 1),
        doubt=Z.verdict(),
    )


def log_probs_of_data(scores: Scored, Z: LogPartition) -> dict[str, Float[Tensor, " W"]]:
    """log P of each true continuation by ``lower``, ``upper`` and ``certified``."""
    log_score, log_weight = scores.log_score[:, 0], scores.log_weight
    among_candidates = log_weight.logsumexp(1) - math.log(log_weight.shape[1])
    return {"lower": log_score - Z.lower, "upper": log_score - Z.upper, "certified": log_score - among_candidates}


def sampler_words(candidates: int, chunk: int | None = None) -> str:
    """Name the sampler whose law a certificate is of.

    >>> sampler_words(256, chunk=5)
    'resampling chunk by chunk, m = 5, n = 256'
    """
    how = "" if chunk is None else f" chunk by chunk, m = {chunk}"
    return f"resampling{how}, n = {candidates}"


def check_draws(draws: int) -> None:
    """Refuse what leaves the upper estimate undefined."""
    if draws < 2:
        raise UserError(
            f"with {max(draws, 0)} draw{'s' * (draws != 1)} per window the upper estimate of log Z is undefined: take "
            "two or more, which is 3 candidates with the true text among them"
        )


def together(*words: str) -> str:
    """What there is to say, in one line."""
    return "; ".join(filter(None, words))


def _below(values: Float[Tensor, "*rows"], others: Float[Tensor, "*others"]) -> Float[Tensor, "*found"]:
    """1 where a value is below the other, a half where they are equal: sums of these are exact in any order."""
    return (values < others).double() + (values == others).double() / 2


def _mean(values: Float[Tensor, " some"]) -> float | None:
    return values.mean().item() if len(values) and values.isfinite().all() else None


def gain_note(gain: Measurement, most: float, n: int) -> str:
    """What the gain is not: beyond doubt, or all that there is; ``most`` is the ceiling in nats per window."""
    found = ""
    if (gain.value or 0.0) > _NEAR_CEILING * most:
        times = "" if math.isclose(most, math.log(n)) else f"{most / math.log(n):.3g} · "
        found = f"the gain is near {times}log {n} = {most:.2f} nats, the most that {n} candidates can certify"
    if gain.low is None or gain.high is None:
        return together(found, "the text is one document, so the gain has no interval")
    if gain.high < 0:
        return "the residual model is worse than its base on this text"
    if gain.low <= 0:
        return together(found, "the interval of the gain holds 0: no gain is shown")
    return found
