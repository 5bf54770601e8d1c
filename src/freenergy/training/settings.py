"""How to optimise: the object is its configuration.

lr(s) = peak · s / warmup                                        for s ≤ warmup, then
cosine:        final + (peak − final) · (1 + cos(π·(s − warmup)/(steps − warmup))) / 2
inverse_sqrt:  peak · sqrt(warmup / s)
"""

import math
from dataclasses import dataclass, field
from typing import Literal, final

from freenergy.errors import UserError

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW with warm-up, a schedule, clipping, gradient accumulation and early stopping."""

    steps: int = 1000
    batch_size: int = 16
    accumulate: int = 1  # micro-batches a step; each has batch_size / accumulate rows
    learning_rate: float = 1e-3
    warmup: int = 100
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    final_share: float = 0.1  # of the peak learning rate, at the end of a cosine
    weight_decay: float = 0.1  # 0 is Adam
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # largest gradient norm; 0 is off
    validate_every: int = 200
    patience: int = 0  # validations without a better value before stopping; 0 never stops early
    checkpoint_seconds: float = _SECONDS_BETWEEN_CHECKPOINTS

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "validate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        for name in ("warmup", "weight_decay", "clip", "patience", "checkpoint_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: set it to 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: set it to at least 0 and below 1")
        if not 0 <= self.final_share <= 1:
            raise UserError(f"final_share is {self.final_share}: set it to at least 0 and at most 1")
        if not 0 < self.learning_rate < math.inf:
            raise UserError(f"learning_rate is {self.learning_rate}: set it above 0")
        if self.batch_size % self.accumulate:
            raise UserError(
                f"a batch of {self.batch_size} does not divide into {self.accumulate} micro-batches: "
                "make batch_size a multiple of accumulate"
            )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 1, 2, …, steps."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        match self.schedule:
            case "constant":
                return self.learning_rate
            case "inverse_sqrt":
                return self.learning_rate * math.sqrt(max(self.warmup, 1) / step)
            case "cosine":
                done = (step - self.warmup) / max(self.steps - self.warmup, 1)
                final = self.final_share * self.learning_rate
                return final + (self.learning_rate - final) * (1 + math.cos(math.pi * min(done, 1))) / 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBase:
    """A transformer trained on the corpus: from scratch by ``preset``, or fine-tuned from ``start``."""

    kind: Literal["train"] = "train"
    preset: str = "tiny"
    start: str = ""  # a checkpoint's path or name; then the preset is not used
    block: int = 160  # tokens of a training row
    dropout: float = 0.0
    label_smoothing: float = 0.0
    validation_tokens: int = 50_000  # of the validation text, read for early stopping
    optimisation: Optimisation = field(default_factory=Optimisation)

    def __post_init__(self) -> None:
        for name in ("block", "validation_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: set it to at least 0 and below 1")
