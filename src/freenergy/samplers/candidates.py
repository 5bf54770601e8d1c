"""Candidates from a proposal, weighed for a target.

    x_i ~ q(· | c),      q = P_LM, or P_LM tempered and truncated at each step
    target "joint":       P(x) ∝ P_LM(x) · e^{−E(x)} on the strings that q can draw,    log w = log P_LM − log q − E
    target "restricted":  P(x) ∝ q(x) · e^{−E(x)} (Algorithm 1 of Deng et al. 2020),    log w = −E

Without truncation and at temperature 1 the two are the same. Under truncation they are far apart: the joint model's own
texts are rare among draws of a top-k proposal, and the weights that correct for that are uneven. A top-k or nucleus
proposal cannot draw every string; ``covered`` estimates P_LM(strings that it can draw) = E_q[P_LM/q], so that it can be
told what the target leaves out.

A string that was drawn twice is read by the energy once, and its weights may be added: choosing among merged strings is
the same law as choosing among draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, Draws, Energy, LanguageModel, Truncation
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.models.draw_with_energy import Split, energies_of_distinct, equal_strings, first_of_each
from freenergy.partition import LogPartition, log_partition

Target = Literal["joint", "restricted"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """N draws of each of B contexts with what is known of them, float64 on the CPU."""

    x: Continuations
    log_base: Float[Tensor, "batch num"]
    log_proposal: Float[Tensor, "batch num"]
    energy: Float[Tensor, "batch num"]
    log_ahead: Float[Tensor, "batch num"] | None = None  # log Ẑ of what may follow, where the choice looks ahead
    target: Target = "restricted"
    truncation: Truncation = ANCESTRAL

    @staticmethod
    def cat(parts: "Sequence[Candidates]", dim: int) -> "Candidates":
        """Candidates of other contexts (dim 0), or more of the same contexts (dim 1)."""
        return replace(
            parts[0],
            x=Continuations.cat([part.x for part in parts], dim),
            log_base=torch.cat([part.log_base for part in parts], dim),
            log_proposal=torch.cat([part.log_proposal for part in parts], dim),
            energy=torch.cat([part.energy for part in parts], dim),
            log_ahead=_together([part.log_ahead for part in parts], dim),
        )

    def take(self, columns: Int[Tensor, " some"]) -> "Candidates":
        """Some candidates of every context, in this order."""
        return replace(
            self,
            x=self.x.candidates(columns),
            log_base=self.log_base[:, columns],
            log_proposal=self.log_proposal[:, columns],
            energy=self.energy[:, columns],
            log_ahead=None if self.log_ahead is None else self.log_ahead[:, columns],
        )

    @property
    def log_weight(self) -> Float[Tensor, "batch num"]:
        """log w: target over proposal, up to a constant."""
        own = log_weight(self.log_base, self.log_proposal, self.energy, self.target)
        return own if self.log_ahead is None else own + self.log_ahead

    @property
    def share(self) -> Float[Tensor, "batch num"]:
        """The chance of each candidate to be chosen."""
        return self.log_weight.softmax(1)

    def first(self) -> Bool[Tensor, "batch num"]:
        """True where a string stands for the first time."""
        return torch.stack([first_of_each(which) for which in equal_strings(self.x)])

    def merged(self) -> Float[Tensor, "batch num"]:
        """log w with the weights of equal strings added: at the first of them; −inf at the others."""
        rows = []
        for log_w, which in zip(self.log_weight, equal_strings(self.x), strict=True):
            # string by string from its own largest, so that none is lost below e^745 of another
            nothing = torch.full_like(log_w, torch.finfo(log_w.dtype).min)
            largest = nothing.scatter_reduce(0, which, log_w, "amax")
            total = torch.zeros_like(log_w).index_add(0, which, (log_w - largest[which]).exp())
            rows.append(torch.where(first_of_each(which), (total.log() + largest)[which], -torch.inf))
        return torch.stack(rows)

    def diagnostics(self) -> LogPartition:
        """log Z of the target relative to the proposal, with effective sample size, k̂ and verdicts."""
        return log_partition(self.log_weight)

    def covered(self) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Share of the base's probability on strings that the proposal can draw, and its standard error.

        1 ± 0 where nothing is cut. P_LM/q is uneven where much is cut: both are then of the draws at hand, and low.
        """
        B, n = self.energy.shape
        if self.truncation.top_k is None and self.truncation.top_p in (None, 1.0):
            return torch.ones(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
        ratio = (self.log_base - self.log_proposal).exp()
        error = ratio.std(1) / n**0.5 if n > 1 else torch.full((B,), torch.inf, dtype=torch.float64)
        return ratio.mean(1).clamp(max=1.0), error

    def check_any_acceptable(self) -> None:
        """Refuse where no candidate has any weight."""
        empty = (self.log_weight == -torch.inf).all(1)
        if empty.any():
            raise UserError(
                f"no candidate is acceptable: all {self.energy.shape[1]} of context {int(empty.nonzero()[0])} have a "
                "weight of zero (an energy of +inf); draw more candidates, or look at the energy"
            )


def log_weight(
    log_base: Float[Tensor, "B N"], log_proposal: Float[Tensor, "B N"], energy: Float[Tensor, "B N"], target: Target
) -> Float[Tensor, "B N"]:
    """log w of draws for a target; see above."""
    return -energy if target == "restricted" else log_base - log_proposal - energy


def propose(
    base: LanguageModel,
    energy: Energy,
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
    *,
    truncation: Truncation = ANCESTRAL,
    target: Target = "restricted",
    batch_size: int = 256,
    advance: Advance | None = None,
) -> Candidates:
    """Draw ``num`` candidates of each context and weigh them, at most ``batch_size`` in one call of the models.

    Contexts that fit are drawn together. Candidates own their randomness, so ``batch_size`` changes a text only where
    rounding decides.
    """
    if num < 1 or batch_size < 1:
        raise UserError(f"{num} candidates, {batch_size} at once, were asked for: ask for at least one")
    split, rows, together = Split.of(energy, base), [], max(1, batch_size // num)
    for b in range(0, len(contexts), together):
        some, stream, parts, known = contexts[b : b + together].trimmed(), rng.shift(contexts=b), [], []
        for n in range(0, num, batch_size):
            count = min(batch_size, num - n)
            draws, E = split.draw(base, some, count, space, stream.shift(candidates=n), truncation)
            parts.append(draws)
            known.append(E)
            if advance is not None:
                advance(count * len(some))
        draws = Draws.cat(parts, dim=1)
        E = torch.cat(known, dim=1) + split.rest(draws.x, rows=batch_size, allow_inf=True)
        rows.append(_weighed(draws, E, truncation=truncation, target=target))
    return Candidates.cat(rows, dim=0)


def weigh(
    energy: Energy,
    draws: Draws,
    *,
    truncation: Truncation = ANCESTRAL,
    target: Target = "restricted",
    batch_size: int = 256,
) -> Candidates:
    """Candidates from draws; equal strings of a context are read by the energy once."""
    E = energies_of_distinct(energy, draws.x, rows=batch_size, allow_inf=True)
    return _weighed(draws, E, truncation=truncation, target=target)


def _weighed(draws: Draws, energy: Float[Tensor, "B N"], *, truncation: Truncation, target: Target) -> Candidates:
    log_base, log_proposal = draws.log_base.double().cpu(), draws.log_proposal.double().cpu()
    return Candidates(
        x=draws.x, log_base=log_base, log_proposal=log_proposal, energy=energy, target=target, truncation=truncation
    )


def _together(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    """All of them, where all are there."""
    there = [part for part in parts if part is not None]
    return torch.cat(there, dim) if len(there) == len(parts) else None
