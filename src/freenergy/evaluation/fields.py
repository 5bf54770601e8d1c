"""Perplexity of a random field on held-out sentences, with bounds, certificate and verdict.

    perplexity = exp(− Σ log p / Σ tokens),        EOS of each sentence counted

Both forms (one constant; one for each length with the law π) have a certified number and estimates: with log Z from
below, from above and by the jackknife. All come from one pool of fresh draws of the base. A pool that trained the field
is refused: the weights were fitted to those draws, so log Z on them is too low by up to a nat.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from freenergy.core.errors import UserError
from freenergy.core.sentences import Sentences
from freenergy.models.length_law import LengthLaw
from freenergy.models.random_field import RandomField
from freenergy.noise.pool import Pool
from freenergy.partition.lengths import LengthSums, pool_partition

Vector = Float64[np.ndarray, " _"]
_MOST_NATS = 700.0  # per token: what a number can still hold


class FieldScores(NamedTuple):
    """What a field says of held-out sentences and of a pool of draws."""

    text: Sentences
    log_base: Vector
    potential: Vector  # of the text
    weights: Vector  # log-weights of the pool's sentences
    sums: LengthSums
    draws_by_length: Vector  # how many sentences of the pool have 0 … m words


def score_field(field: RandomField, text: Sentences, pool: Pool) -> FieldScores:
    """Score sentences and a fresh pool; a pool that trained the field is refused."""
    if pool.fingerprint in field.trained_on:
        raise UserError(
            "this pool of draws trained the field, and a perplexity from it would flatter: log Z on those draws is too "
            "low by up to a nat; draw a fresh pool with another seed"
        )
    if field.base is None:
        raise UserError("a field without a base has no weights of draws: use its exact normaliser, or annealing")
    log_base, potential, weights = field.log_base(text), field.potential(text), field.potential(pool.text)
    sums = LengthSums.of(weights, pool.text.lengths, pool.draws, field.longest)
    counts = np.bincount(pool.text.lengths, minlength=field.longest + 1).astype(np.float64)
    return FieldScores(text, log_base, potential, weights, sums, counts)


def measure_field(found: FieldScores, law: LengthLaw) -> dict[str, Any]:
    """Return every perplexity of a field, with log Z and the verdict on it."""
    text, lengths = found.text, found.text.lengths
    z = pool_partition(found.weights, found.sums.draws)
    certified = {
        "global": found.log_base + found.sums.certified(found.potential, lengths),
        "by length": found.log_base + found.sums.certified(found.potential, lengths, law),
    }
    joint = found.log_base + found.potential
    estimates = {name: joint - getattr(z, name).item() for name in ("lower", "upper", "jackknife")}
    return {
        "sentences": text.num,
        "tokens": len(text.tokens),
        "base": perplexity_of(found.log_base, text),
        "global": {"certified": perplexity_of(certified["global"], text)}
        | {name: perplexity_of(values, text) for name, values in estimates.items()},
        "by length": {
            "certified": perplexity_of(certified["by length"], text),
            "estimate": estimate_by_length(found, law),
            "lengths by a line": found.sums.few(),
        },
        "gain": {name: gain_of(values - found.log_base) for name, values in certified.items()},
        "log Z": {
            "lower": finite(z.lower.item()),
            "upper": finite(z.upper.item()),
            "jackknife": finite(z.jackknife.item()),
            "standard error": finite(z.standard_error.item()),
            "ess": finite(z.ess.item()),
            "draws": found.sums.draws,
            "k_hat": finite(z.k_hat.item()),
        },
        "verdict": z.verdict(),
    }


def finite(value: float) -> float | None:
    """Return a number for JSON, which knows neither infinity nor NaN."""
    return float(value) if math.isfinite(value) else None


def estimate_by_length(found: FieldScores, law: LengthLaw) -> list[float] | list[None]:
    """Return the perplexity with estimated log Z_l; nothing where no length has enough draws that count."""
    lengths, each = found.text.lengths, found.sums.per_length()
    if found.sums.few() == len(each.values):
        return [None, None, None]
    known = np.log(np.maximum(found.draws_by_length[1:], 0.5) / found.sums.draws)  # the base's law of lengths
    log_z = each.filled(offset=known).log_z(lengths)
    return perplexity_of(found.log_base + found.potential + law.log_prob(lengths) - log_z, found.text)


def perplexity_of(log_prob: Vector, text: Sentences) -> list[float]:
    """Return perplexity and its 95 % interval over sentences: a ratio of sums, linearised."""
    tokens = np.diff(text.bounds).astype(np.float64)
    H, R = -log_prob.sum() / tokens.sum(), text.num
    if R < 2 or not H < _MOST_NATS:
        return [math.exp(H if H < _MOST_NATS else _MOST_NATS)] * 3
    residual = -log_prob - H * tokens
    error = math.sqrt(R / (R - 1) * float(residual @ residual)) / tokens.sum()
    t = float(stdtrit(R - 1, 0.975))
    return [math.exp(H), math.exp(H - t * error), math.exp(H + t * error)]


def gain_of(nats: Vector) -> list[float]:
    """Return the mean gain in nats per sentence, and its 95 % interval."""
    if len(nats) < 2:
        return [float(nats.mean())] * 3
    error = float(nats.std(ddof=1)) / math.sqrt(len(nats)) * float(stdtrit(len(nats) - 1, 0.975))
    return [float(nats.mean()), float(nats.mean()) - error, float(nats.mean()) + error]
