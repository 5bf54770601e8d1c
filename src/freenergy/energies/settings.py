"""Which energy: the object is its configuration, and the union of these types is the registry.

E(c, x) is one number a continuation, and every energy starts at E = 0, so that training begins with the base itself.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.errors import UserError

Pool = Literal["mean", "sum"]
Over = Literal["continuation", "all"]


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"dropout is {dropout}: set it to at least 0 and below 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEnergy:
    """A causal trunk that begins as the base; pooled states to a scalar."""

    kind: Literal["unit"] = "unit"
    pool: Pool = "mean"
    over: Over = "continuation"  # which states are pooled
    dropout: float = 0.0
    int8: bool = False  # once it is trained its linear layers are read in int8, on a CPU

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BitEnergy:
    """A bidirectional trunk; pooled states to a scalar.

    ``start``: "encoder" is a pretrained encoder with its own tokenizer (``encoder`` names it), "base" the base's
    weights with the causal mask removed, "scratch" a network of ``preset`` that first learns to fill masks.
    """

    kind: Literal["bit"] = "bit"
    start: Literal["encoder", "base", "scratch"] = "base"
    encoder: str = ""
    preset: str = "tiny"
    mask_share: float = 0.15  # of tokens, while a scratch trunk learns to fill masks
    pool: Pool = "mean"
    over: Over = "continuation"
    prefix_once: bool = False  # the prefix's states do not see the continuation, and are computed once for N candidates
    dropout: float = 0.0
    int8: bool = False  # once it is trained its linear layers are read in int8, on a CPU

    def __post_init__(self) -> None:
        if (self.start == "encoder") != bool(self.encoder):
            raise UserError(
                f'start is "{self.start}" and encoder {self.encoder!r}: an encoder goes with "encoder" alone'
            )
        _check_dropout(self.dropout)
        if not 0 < self.mask_share < 1:
            raise UserError(f"mask_share is {self.mask_share}: set it above 0 and below 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatioEnergy:
    """α·(log P_LM − log Q) + a pooled scalar of Q's states; Q begins as a copy of the base, and learns."""

    kind: Literal["log-ratio"] = "log-ratio"
    alpha: float = 0.25
    pool: Pool = "mean"
    over: Over = "continuation"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)
        if not math.isfinite(self.alpha):
            raise UserError(f"alpha is {self.alpha}: set it to a number, such as 0.25")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnergy:
    """Linear in what the base computes while it samples: pooled hidden states, and statistics of its predictions."""

    kind: Literal["probe"] = "probe"
    layers: tuple[int, ...] = ()  # hidden states that are read, 0 the embeddings; none given: a third, two thirds, last
    states: bool = True
    statistics: bool = True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NgramEnergy:
    """Log-linear in counts of n-grams and skip-grams: in the training text, in the prefix, in the continuation."""

    kind: Literal["ngram"] = "ngram"
    order: int = 5
    skips: tuple[int, ...] = (1, 2)  # tokens left out between the two of a skip-gram
    lexicon: int = 256  # the most frequent tokens of the training text, which have a weight each

    def __post_init__(self) -> None:
        if not 1 <= self.order <= 8:
            raise UserError(f"order is {self.order}: set it to at least 1 and at most 8")
        if self.lexicon < 0:
            raise UserError(f"lexicon is {self.lexicon}: set it to 0 or more tokens that have a weight each")
        if len(set(self.skips)) < len(self.skips) or any(not 1 <= skip <= 16 for skip in self.skips):
            raise UserError(f"skips is {list(self.skips)}: give different numbers from 1 to 16, or none")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEnergy:
    """An energy that was trained before, kept as it is."""

    kind: Literal["saved"] = "saved"
    path: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEnergy:
    """The level of the base's own logits, for a base that was trained with ``base.earm``; nothing is learned."""

    kind: Literal["logits"] = "logits"


PartEnergy = UnitEnergy | BitEnergy | LogRatioEnergy | ProbeEnergy | NgramEnergy | LogitsEnergy | SavedEnergy


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductEnergy:
    """A sum of energies, so a product of their factors. Linear parts are fitted together, then networks one by one."""

    kind: Literal["product"] = "product"
    parts: tuple[PartEnergy, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise UserError('a product needs parts: give at least one, such as {kind = "ngram"}')
        if all(isinstance(part, SavedEnergy) for part in self.parts) and len(self.parts) < 2:
            raise UserError("a product of one saved energy learns nothing: add a part that learns")


EnergySettings = PartEnergy | ProductEnergy
