"""What a random field is divided by, as an object that says how it was found.

    Single      log Z            one number for all sentences                    (GN-ELM, WSME)
    PerLength   log Z_1 … Z_m    one number for each length                      (TRF)
    Linear      a + b · l        its limit: with features of bounded reach log Z_l → l · log λ_1 + const
    Transfer    log Z_1 … Z_m    exact, by the transfer matrix of pair features  (``models.transfer``)

``is_exact`` says whether ``log_z`` is the sum itself; where it is not, ``standard_error`` and ``ess`` come with it.
"""

from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float64, Integer

from freenergy.core.errors import UserError

_LEAST_EFFECTIVE = 30.0  # draws of a length, below which its own estimate is not used

Vector = Float64[np.ndarray, " _"]
Lengths = Integer[np.ndarray, " _"]


@runtime_checkable
class Normaliser(Protocol):
    """log Z as a function of the length."""

    @property
    def is_exact(self) -> bool:
        """Whether the numbers are sums over all sentences."""

    @property
    def per_length(self) -> bool:
        """Whether lengths have constants of their own, so that a length law is needed."""

    def log_z(self, lengths: Lengths) -> Float64[np.ndarray, " _"]:
        """Return log Z of sentences of these lengths."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One constant for all sentences."""

    value: float
    standard_error: float = 0.0
    ess: float = float("inf")
    draws: int = 0
    is_exact: bool = False
    per_length: bool = field(default=False, init=False)

    def log_z(self, lengths: Lengths) -> Float64[np.ndarray, " _"]:
        """Return the constant for each."""
        return np.full(len(lengths), self.value)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerLength:
    """ζ_l = log Z_l for l = 1 … m."""

    values: Vector
    standard_error: Vector | None = None
    ess: Vector | None = None
    is_exact: bool = False
    per_length: bool = field(default=True, init=False)

    def log_z(self, lengths: Lengths) -> Float64[np.ndarray, " _"]:
        """Return ζ of each length; a length beyond m is refused."""
        check_lengths(lengths, len(self.values))
        found: Float64[np.ndarray, " _"] = self.values[np.asarray(lengths) - 1]
        return found

    def filled(self, least: float = _LEAST_EFFECTIVE, offset: Vector | None = None) -> "PerLength":
        """Return the same with a straight line in place of lengths that have too few effective draws.

        ``offset`` is a part of log Z_l that is known and no line, such as the base's log-probability of the length.
        """
        if self.ess is None:
            return self
        few = self.ess < least
        if few.all():
            raise UserError(f"no length has {least:g} effective draws: draw more, or fit with a stronger penalty")
        if not few.any():
            return self
        known = np.zeros(len(self.values)) if offset is None else offset
        line = Linear.fit(PerLength(values=self.values - known, ess=self.ess), least)
        at = np.arange(1, len(self.values) + 1)
        values = np.where(few, line.log_z(at) + known, self.values)
        return PerLength(values=values, standard_error=self.standard_error, ess=self.ess)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """log Z_l = a + b · l: two numbers, exact in the limit of long sentences."""

    a: float
    b: float
    is_exact: bool = False
    per_length: bool = field(default=True, init=False)

    @classmethod
    def fit(cls, values: PerLength, least: float = 0.0) -> "Linear":
        """Fit a line to the lengths that are known, weighed by their effective draws."""
        at = np.arange(1, len(values.values) + 1, dtype=np.float64)
        weight = np.ones(len(at)) if values.ess is None else np.where(values.ess >= least, values.ess, 0.0)
        weight = np.where(np.isfinite(values.values), weight, 0.0)
        known = weight > 0
        if known.sum() < 2:
            return cls(a=float(values.values[known][0]) if known.any() else 0.0, b=0.0)
        b, a = np.polyfit(at[known], values.values[known], 1, w=np.sqrt(weight[known]))
        return cls(a=float(a), b=float(b))

    def log_z(self, lengths: Lengths) -> Float64[np.ndarray, " _"]:
        """Return a + b · l."""
        found: Float64[np.ndarray, " _"] = self.a + self.b * np.asarray(lengths, dtype=np.float64)
        return found


def check_lengths(lengths: Lengths, longest: int) -> None:
    """Refuse a sentence that the field does not have."""
    if len(lengths) and (int(np.min(lengths)) < 1 or int(np.max(lengths)) > longest):
        bad = int(np.max(lengths)) if int(np.max(lengths)) > longest else int(np.min(lengths))
        raise UserError(
            f"a sentence has {bad} words, and the field has those of 1 to {longest}: leave it out, or fit the field on "
            "longer ones"
        )
