"""The base alone, through the same door as the joint model's samplers.

    x ~ q(· | c),      q = P_LM, or P_LM tempered and truncated

The base is the target, so the distance is 0. The energy says what it thinks of the draws and changes none: to compare.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, Energy, LanguageModel, Truncation
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.samplers.candidates import Candidates, propose
from freenergy.samplers.sampled import SILENT, Sampled, check_counts, check_one, picked, tokens_in


def no_energy(x: Continuations) -> Float[Tensor, "B N"]:
    """E = 0: the joint model is the base."""
    return torch.zeros(x.shape, dtype=torch.float64)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """``num`` independent draws of the base."""

    num: int = 1
    truncation: Truncation = ANCESTRAL
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_counts(self, ("num", "batch_size"))

    def __call__(
        self,
        base: LanguageModel,
        energy: Energy,
        context: Sequences,
        space: SequenceSpace,
        rng: Rng,
        progress: Progress = SILENT,
    ) -> Sampled:
        """Draw."""
        check_one(context)
        with progress.track("drawing", self.num, "continuations") as advance:
            found = propose(
                base, energy, context, self.num, space, rng.child("draw"),
                truncation=self.truncation, batch_size=self.batch_size, advance=advance,
            )  # fmt: skip
        return all_of(found)


def all_of(found: Candidates) -> Sampled:
    """Every draw is a result."""
    return Sampled(
        x=picked(found, torch.arange(found.energy.shape[1])),
        log_base=found.log_base,
        energy=found.energy,
        method="base",
        target="base",
        distance=0.0,
        is_estimated=False,
        base_tokens=tokens_in(found.x),
    )
