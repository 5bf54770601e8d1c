"""Continuations with all that is known of them: one record for candidates, windows and ranked texts.

    log_score  = log_base − energy                        log P(x | c) + log Z(c), not normalised
    log_weight = log_base − log_proposal − energy         law "model": the model itself, on the strings that q can draw
    log_weight = −energy                                  law "restricted": the model with q in place of P_LM
                                                          (Algorithm 1 of Deng et al. 2020)
    ESS = (Σ w)² / Σ w²                                   the effective sample size

Without truncation and at temperature 1 the two laws are the same. Under truncation they are far apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations
from freenergy.core.truncation import ANCESTRAL, Truncation

Law = Literal["model", "restricted"]
_NUMBERS = ("log_base", "log_proposal", "energy", "log_ahead")  # [batch, num] each


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """N continuations of each of B contexts and their numbers, float64 on the CPU."""

    x: Continuations
    log_base: Float[Tensor, "batch num"]
    log_proposal: Float[Tensor, "batch num"]  # the log-probability with which x was drawn; log_base where it was given
    energy: Float[Tensor, "batch num"]
    log_ahead: Float[Tensor, "batch num"] | None = None  # log Ẑ of what may follow, where the choice looks ahead
    law: Law = "restricted"
    truncation: Truncation = ANCESTRAL

    @staticmethod
    def cat(parts: "Sequence[Scored]", dim: int) -> "Scored":
        """Join continuations of other contexts (dim 0), or more of the same contexts (dim 1)."""
        columns = {name: [getattr(part, name) for part in parts] for name in _NUMBERS}
        joined: dict[str, Any] = {
            name: None if any(part is None for part in own) else torch.cat(own, dim) for name, own in columns.items()
        }
        return replace(parts[0], x=Continuations.cat([part.x for part in parts], dim), **joined)

    def __len__(self) -> int:
        return self.energy.shape[0]

    @property
    def num(self) -> int:
        """The number of continuations of each context."""
        return self.energy.shape[1]

    def take(self, columns: Int[Tensor, " some"]) -> "Scored":
        """Select continuations of every context, in this order; one may come more than once."""
        return self._selected(self.x.candidates(columns), (slice(None), columns))

    def __getitem__(self, rows: slice) -> "Scored":
        return self._selected(self.x[rows], rows)

    def _selected(self, x: Continuations, at: slice | tuple[slice, Tensor]) -> "Scored":
        columns = {name: getattr(self, name) for name in _NUMBERS}
        selected: dict[str, Any] = {name: None if own is None else own[at] for name, own in columns.items()}
        return replace(self, x=x, **selected)

    def of_context(self, b: int) -> "Scored":
        """Select one context, on the CPU and without columns that are padding."""
        x = self.x[b : b + 1].to("cpu")
        return replace(self[b : b + 1], x=Continuations(x.contexts.trimmed(), x.tokens, x.lengths))

    @property
    def tokens_drawn(self) -> int:
        """The number of tokens in all continuations."""
        return int(self.x.lengths.sum())

    @property
    def log_score(self) -> Float[Tensor, "batch num"]:
        """log P_LM − E: not normalised."""
        return self.log_base - self.energy

    @property
    def log_weight(self) -> Float[Tensor, "batch num"]:
        """log w: target over proposal, up to a constant."""
        own = -self.energy if self.law == "restricted" else self.log_base - self.log_proposal - self.energy
        own = own.masked_fill(self.log_proposal == -torch.inf, -torch.inf)  # a given string that q cannot draw
        return own if self.log_ahead is None else own + self.log_ahead

    @property
    def share(self) -> Float[Tensor, "batch num"]:
        """The probability that each continuation is chosen by weight."""
        return self.log_weight.softmax(1)

    @property
    def ess(self) -> Float[Tensor, " batch"]:
        """The effective sample size of each context."""
        return effective_sample_size(self.log_weight)

    def first(self) -> Bool[Tensor, "batch num"]:
        """True where a string occurs for the first time among those of its context."""
        return torch.stack([first_of_each(which) for which in equal_strings(self.x)])

    def merged(self) -> Float[Tensor, "batch num"]:
        """log w with the weights of equal strings added, at the first of them; −inf at the others: the same law."""
        rows = []
        for log_w, which in zip(self.log_weight, equal_strings(self.x), strict=True):
            # string by string from its own largest, so that none is lost below e^745 of another
            nothing = torch.full_like(log_w, torch.finfo(log_w.dtype).min)
            largest = nothing.scatter_reduce(0, which, log_w, "amax")
            total = torch.zeros_like(log_w).index_add(0, which, (log_w - largest[which]).exp())
            rows.append(torch.where(first_of_each(which), (total.log() + largest)[which], -torch.inf))
        return torch.stack(rows)

    def covered(self) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Estimate P_LM(strings that the proposal can draw) = E_q[P_LM/q], with its standard error.

        1 ± 0 where nothing is cut. P_LM/q is uneven where much is cut: both are then of the draws at hand, and low.
        """
        B, n = self.energy.shape
        if self.truncation.top_k is None and self.truncation.top_p in (None, 1.0):
            return torch.ones(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
        ratio = (self.log_base - self.log_proposal).exp()
        error = ratio.std(1) / n**0.5 if n > 1 else torch.full((B,), torch.inf, dtype=torch.float64)
        return ratio.mean(1).clamp(max=1.0), error

    def check_any_acceptable(self) -> None:
        """Refuse a context in which every continuation has weight zero."""
        empty = (self.log_weight == -torch.inf).all(1)
        if empty.any():
            raise UserError(
                f"no candidate is acceptable: all {self.num} of context {int(empty.nonzero()[0])} have a "
                "weight of zero (an energy of +inf); draw more candidates, or look at the energy"
            )


def effective_sample_size(log_weights: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    """Return the number of equal weights that would be worth as much: from 1 to n, or 0 where no draw has weight.

    >>> effective_sample_size(torch.tensor([[5.0, 5.0], [5.0, -999.0], [-torch.inf, -torch.inf]]))
    tensor([2., 1., 0.], dtype=torch.float64)
    """
    log_weights = log_weights.double()
    ess = (2 * log_weights.logsumexp(1) - (2 * log_weights).logsumexp(1)).exp()
    return torch.where((log_weights == -torch.inf).all(1), 0.0, ess)


def equal_strings(x: Continuations) -> list[Int[Tensor, " num"]]:
    """Number the different strings of each context, and say which of them every continuation is."""
    tokens = x.tokens.cpu().masked_fill(~x.mask.cpu(), -1)
    return [torch.unique(row, dim=0, return_inverse=True)[1] for row in tokens]


def first_of_each(which: Int[Tensor, " num"]) -> Bool[Tensor, " num"]:
    """True at the first place of every number 0, 1, …"""
    num = len(which)
    places = torch.full((num,), num).scatter_reduce(0, which, torch.arange(num), "amin")
    return torch.zeros(num, dtype=torch.bool).scatter(0, places[places < num], True)
