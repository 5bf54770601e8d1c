"""What a residual model thinks of given continuations, and the order that follows from it.

    share_i = P(x_i | c) / Σ_j P(x_j | c) = softmax(log_score)_i,      log_score = log P_LM − E

Z(c) is the same for all continuations of one context, so the residual model's probability of each of n candidates,
given that it is one of these, is known exactly. For a base that only samples log P_LM is unknown, and 0 stands for it:
the order is then by energy, by how much likelier the residual model makes a text than the base does.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.corpus.tokenize_pair import Joined
from freenergy.text.texts import data_frame, finite

if TYPE_CHECKING:
    import pandas


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One candidate of a list, and what the residual model thinks of it."""

    text: str
    tokens: int
    log_base: float
    energy: float
    log_score: float
    share: float  # of the list's probability
    rank: int  # 1 is the best; of equals the earlier one is better
    is_apart: bool  # encoded without its prefix, since the tokenizer joins across the border
    reads_as: str | None  # what its tokens spell, where that is not the text

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {name: finite(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


@final
@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates for what comes after a prefix, in the order in which they were given."""

    prefix: str
    candidates: tuple[Ranked, ...]
    has_log_prob: bool = True  # False: the base only samples, and the order is by energy alone

    @classmethod
    def of(
        cls,
        prefix: str,
        texts: Sequence[str],
        joined: Joined,
        log_base: Float[Tensor, " N"],
        energy: Float[Tensor, " N"],
        *,
        has_log_prob: bool = True,
    ) -> "Ranking":
        """Rank the candidates of one context by their scores."""
        log_score = log_base - energy
        if log_score.isnan().any():
            i = int(log_score.isnan().nonzero()[0])
            raise UserError(f"candidate {i + 1} ({texts[i][:40]!r}) has no score: the base gave {log_base[i]}")
        if (log_score == -torch.inf).all():
            raise UserError(
                f"no candidate is acceptable, {len(texts)} of {len(texts)} have probability zero: give others, or look "
                "at why the energy forbids these"
            )
        order = log_score.argsort(descending=True, stable=True)  # of equals the earlier one is first
        columns = (log_base, energy, log_score, log_score.softmax(0), order.argsort() + 1)
        names = ("log_base", "energy", "log_score", "share", "rank")
        ranked = [
            Ranked(text=text, tokens=len(how.tokens), is_apart=how.is_apart, reads_as=how.reads_as,
                   **dict(zip(names, row, strict=True)))
            for text, how, *row in zip(texts, joined.texts, *(column.tolist() for column in columns), strict=True)
        ]  # fmt: skip
        return cls(prefix, tuple(ranked), has_log_prob)

    @property
    def best(self) -> Ranked:
        """The candidate of rank 1."""
        return min(self.candidates, key=lambda candidate: candidate.rank)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, i: int) -> Ranked:
        return self.candidates[i]

    def __str__(self) -> str:
        lines = [f"{'rank':>4} {'share':>7} {'log_score':>10} {'log_base':>10} {'energy':>9} {'tokens':>6}  text"]
        for one in sorted(self.candidates, key=lambda candidate: candidate.rank):
            base = f"{one.log_base:10.3f}" if self.has_log_prob else f"{'–':>10}"
            numbers = f"{one.rank:4} {one.share:7.2%} {one.log_score:10.3f} {base} {one.energy:9.3f}"
            mark = " (encoded apart from the prefix)" * one.is_apart
            mark += "" if one.reads_as is None else f" (its tokens read {_short(one.reads_as)})"
            lines.append(f"{numbers} {one.tokens:6}  {_short(one.text)}{mark}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The candidates in the order in which they were given, with their ranks."""
        unknown = {} if self.has_log_prob else {"log_base": None}
        rows = [candidate.to_json() | unknown for candidate in self.candidates]
        return {"prefix": self.prefix, "best": self.best.text, "candidates": rows}

    def to_frame(self) -> "pandas.DataFrame":
        """Return one row per candidate."""
        return data_frame([asdict(candidate) for candidate in self.candidates])


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
