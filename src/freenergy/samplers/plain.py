"""The base alone, called like the residual model's samplers.

    x ~ q(· | c),      q = P_LM, or P_LM tempered and truncated

The base is the target, so the distance is 0. The energy scores the draws without changing them, for comparison.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import final

import torch

from freenergy.core.checks import check_range
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.models.residual import relative_to_base
from freenergy.samplers.requests import DrawRequest, drive
from freenergy.samplers.sampled import SILENT, Sampled, check_call, picked


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Independent draws of the base."""

    truncation: Truncation = ANCESTRAL
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Draw."""
        return drive(self.requests(target, num, rng), progress)

    def requests(self, target: Target[Model], num: int, rng: Rng) -> Generator[DrawRequest, Scored, Sampled]:
        """Do the same in steps, so that many share the calls of the models."""
        check_call(target, num)
        request = DrawRequest(
            target=relative_to_base(target), num=num, rng=rng.child("draw"),
            truncation=self.truncation, batch_size=self.batch_size,
        )  # fmt: skip
        return all_of((yield from request.in_parts()))


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
