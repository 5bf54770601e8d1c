"""The loss of a network that maps a context to logits: the object is its configuration.

``training.tasks.autoregressive`` says what each of these adds to the loss.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.errors import UserError
from freenergy.objectives.earm import EARM


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSampling:
    """The share of replaced tokens grows linearly from 0 at ``start_epoch`` to ``most`` after ``epochs`` more."""

    most: float = 0.25
    start_epoch: float = 0.0
    epochs: float = 1.0
    by: Literal["sample", "argmax"] = "sample"  # how a prediction is chosen

    def __post_init__(self) -> None:
        if not 0 < self.most <= 1:
            raise UserError(f"most is {self.most}: set the share of replaced tokens above 0 and at most 1")
        for name in ("start_epoch", "epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: set it to 0 or more")

    def share(self, epoch: float) -> float:
        """Of replaced tokens, at this point of training."""
        since = epoch - self.start_epoch
        if since < 0:
            return 0.0
        return self.most * min(since / self.epochs, 1.0) if self.epochs else self.most


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelLoss:
    """Cross-entropy, and what is added to it in any combination."""

    label_smoothing: float = 0.0
    level: float = (
        0.0  # weight of S², S = log Σ_v e^{logit v}: holds the level of the logits, which a softmax leaves free
    )
    scheduled: ScheduledSampling | None = None
    earm: EARM | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.level < math.inf:
            raise UserError(f"level is {self.level}: set the weight of the squared log-sum of logits to 0 or more")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}: set it to at least 0 and below 1")
