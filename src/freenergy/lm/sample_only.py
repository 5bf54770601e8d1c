"""Bases of which nothing is known but their draws.

    log P_LM(x | c)                                        unknown
    log P(x | c) − log P_LM(x | c) = −E(c, x) − log Z(c)   known as well as for any base

Relative to its own law such a base has density one. So by agreement ``log_base`` and ``log_proposal`` of its draws are
0: differences of log-densities, weights and certified gains are what they would be with probabilities. What needs log
P_LM itself (perplexity) is left out where results are reported, and ``log_prob`` and ``next_log_probs`` refuse.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations


@runtime_checkable
class SampleOnly(Protocol):
    """A language model that may say that it has no probabilities; others need not say anything."""

    @property
    def is_sample_only(self) -> bool:
        """Whether ``log_prob`` and ``next_log_probs`` refuse."""
        ...


@runtime_checkable
class Divided(Protocol):
    """A base whose draws are finite, and so are divided among the splits of the text."""

    def part(self, split: str) -> LanguageModel:
        """Return the base that draws what belongs to a split."""
        ...


def has_log_prob(lm: LanguageModel) -> bool:
    """Return whether a base gives probabilities."""
    return not (isinstance(lm, SampleOnly) and lm.is_sample_only)


def relative_log_prob(lm: LanguageModel, x: Continuations) -> Float[Tensor, "B N"]:
    """Compute log P_LM(x | c), or 0 for a base that only draws: float64 on the CPU."""
    return lm.log_prob(x).double().cpu() if has_log_prob(lm) else torch.zeros(x.shape, dtype=torch.float64)


def part_of(lm: LanguageModel, split: str) -> LanguageModel:
    """Return the base that draws for windows of a split: itself, unless its draws are divided."""
    return lm.part(split) if isinstance(lm, Divided) else lm
