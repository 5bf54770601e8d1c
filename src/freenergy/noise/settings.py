"""Which negatives, and how many: the object is its configuration.

K negatives per prefix = Σ_j K_j,     K_j ≈ K · share_j / Σ share,     every K_j ≥ 1     (largest remainders)
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.truncation import Truncation

_LEAVE_OUT = ", or leave the source out"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BaseNegatives:
    """Drawn from the base. A temperature is corrected for in training; what is truncated is never drawn."""

    kind: Literal["base"] = "base"
    share: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "share", above=0, hint=_LEAVE_OUT)
        _ = self.truncation  # refuses what cannot be

    @property
    def truncation(self) -> Truncation:
        """How the proposal is made from the base."""
        return Truncation(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def covers(self) -> bool:
        """True when every text can be drawn."""
        return self.top_k is None and self.top_p in (None, 1.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InfilledNegatives:
    """The true continuation with a share of its tokens masked and filled by a masked language model."""

    kind: Literal["infilled"] = "infilled"
    share: float = 1.0
    model: str  # a folder with a masked language model
    mask_share: float = 0.4

    def __post_init__(self) -> None:
        check_range(self, "share", above=0, hint=_LEAVE_OUT)
        check_range(self, "mask_share", above=0, at_most=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedNegatives:
    """Drawn from a copy of the base's network that learns the text while the energy is trained (dynamic NCE)."""

    kind: Literal["learned"] = "learned"
    share: float = 1.0
    rate: float = 1.0  # its learning rate, relative to the energy's

    def __post_init__(self) -> None:
        check_range(self, "share", above=0, hint=_LEAVE_OUT)
        check_range(self, "rate", at_least=0, hint="; with 0 the noise does not learn")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeSettings:
    """How many negatives of how many windows, and where they come from."""

    per_prefix: int = 16  # K
    windows: int = 2000  # of the training split; 0 is all
    validation_windows: int = 200
    validation_per_prefix: int = 63  # always from the base, untruncated: a certificate with n = 64
    sources: tuple[BaseNegatives | InfilledNegatives | LearnedNegatives, ...] = (BaseNegatives(),)
    fresh: bool = False  # drawn again at every step, instead of once and stored
    shard: int = 64  # windows in a file of the store

    def __post_init__(self) -> None:
        why = ", as contrast needs at least one negative per prefix"
        check_range(self, "per_prefix", "validation_per_prefix", at_least=1, hint=why)
        check_range(self, "validation_windows", "shard", at_least=1)
        check_range(self, "windows", at_least=0, hint=" (0 for all)")
        if not self.sources:
            raise UserError('negatives need at least one source: give one, such as {kind = "base"}')
        if self.per_prefix < len(self.sources):
            raise UserError(
                f"per_prefix is {self.per_prefix}, but there are {len(self.sources)} sources and each gives at least "
                f"one negative: set per_prefix to {len(self.sources)} or more"
            )
        if self.learns and (len(self.sources) > 1 or not self.fresh):
            raise UserError(
                "a learned noise changes while the energy is trained, so its negatives cannot be stored or mixed with "
                "others: set negatives.fresh = true and give it as the only source"
            )

    @property
    def learns(self) -> bool:
        """True when the noise is trained too."""
        return any(isinstance(source, LearnedNegatives) for source in self.sources)

    @property
    def is_base(self) -> bool:
        """True when every negative is a plain draw of the base."""
        return all(isinstance(source, BaseNegatives) and source.truncation.is_identity for source in self.sources)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many of the K negatives of a prefix each source gives."""
        return divide(self.per_prefix, tuple(source.share for source in self.sources))

    @property
    def is_relative(self) -> bool:
        """True when the law of the noise cannot be corrected for: it is unknown, or zero on some text.

        The optimum of training is then relative to that law.
        """
        is_unknown = any(isinstance(source, InfilledNegatives) for source in self.sources)
        return is_unknown or not any(getattr(source, "covers", True) for source in self.sources)


def divide(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Whole numbers of at least one that sum to the total, nearest to the shares; the first wins a tie.

    >>> divide(16, (3.0, 1.0)), divide(4, (1.0, 1.0, 1.0)), divide(3, (1000.0, 1.0))
    ((12, 4), (2, 1, 1), (2, 1))
    """
    wanted = [total * share / sum(shares) for share in shares]
    counts = [max(1, math.floor(number)) for number in wanted]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        # the one that is furthest from its share, on the side that the step corrects; never below one
        open_places = [j for j in range(len(counts)) if step > 0 or counts[j] > 1]
        j = max(open_places, key=lambda j: (step * (wanted[j] - counts[j]), -j))
        counts[j] += step
    return tuple(counts)
