"""The base alone, called like the residual model's samplers.

    x ~ q(· | c),      q = P_LM, or P_LM tempered and truncated

The base is the target, so the distance is 0. The energy scores the draws and changes none: to compare.
"""

from dataclasses import dataclass
from typing import final

import torch

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, Model, Target, Truncation
from freenergy.core.scored import Scored
from freenergy.models.residual import residual_of
from freenergy.samplers.sampled import SILENT, Sampled, check_call, check_counts, picked


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Independent draws of the base."""

    truncation: Truncation = ANCESTRAL
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_counts(self, ("batch_size",))

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Draw."""
        check_call(target, num)
        with progress.track("drawing", num, "continuations") as advance:
            found = residual_of(target).propose(
                target.contexts, num, target.space, rng.child("draw"),
                truncation=self.truncation, batch_size=self.batch_size, advance=advance,
            )  # fmt: skip
        return all_of(found)


def all_of(found: Scored) -> Sampled:
    """Return every draw as a result."""
    return Sampled(
        x=picked(found, torch.arange(found.num)),
        log_base=found.log_base,
        energy=found.energy,
        method="base",
        law="base",
        distance=0.0,
        is_estimated=False,
        base_tokens=found.tokens_drawn,
    )
