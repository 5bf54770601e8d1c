"""How to optimise: the object is its configuration.

lr(s) = peak · s / warmup                                        for s ≤ warmup, then
cosine:        final + (peak − final) · (1 + cos(π·(s − warmup)/(steps − warmup))) / 2
inverse_sqrt:  peak · sqrt(warmup / s)
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.lm.settings import LocalSettings, NgramBase
from freenergy.objectives import EARM, BinaryNCE, RankingNCE

# of a field that is a section: a recipe that sets some of its keys keeps the others of the field's own default
KEEP_DEFAULT = {"keep_default": True}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW with warm-up, a schedule, clipping, gradient accumulation and early stopping."""

    steps: int = 1000
    batch_size: int = 16
    accumulate: int = 1  # micro-batches per step; each has batch_size / accumulate rows
    learning_rate: float = 1e-3
    warmup: int = 100
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    final_share: float = 0.1  # of the peak learning rate, at the end of a cosine
    weight_decay: float = 0.1  # 0 is Adam
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # largest gradient norm; 0 is off
    validate_every: int = 200
    ema: float = 0.0  # decay of the average of weights that is validated and kept; 0 keeps the weights themselves
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto is bfloat16 on a GPU
    patience: int = 0  # validations without a better value before stopping; 0 never stops early
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_range(self, "steps", "batch_size", "accumulate", "validate_every", at_least=1)
        check_range(self, "warmup", "weight_decay", "clip", "patience", "checkpoint_seconds", at_least=0)
        check_range(self, "beta1", "beta2", "ema", at_least=0, below=1)
        check_range(self, "final_share", at_least=0, at_most=1)
        check_range(self, "learning_rate", above=0)
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
class ScheduledSampling:
    """The share of replaced tokens grows linearly from 0 at ``start_epoch`` to ``most`` after ``epochs`` more."""

    most: float = 0.25
    start_epoch: float = 0.0
    epochs: float = 1.0
    by: Literal["sample", "argmax"] = "sample"  # how a prediction is chosen

    def __post_init__(self) -> None:
        check_range(self, "most", above=0, at_most=1, hint=", the share of replaced tokens")
        check_range(self, "start_epoch", "epochs", at_least=0)

    def share(self, epoch: float) -> float:
        """Returns the share of replaced tokens at this point of training."""
        since = epoch - self.start_epoch
        if since < 0:
            return 0.0
        return self.most * min(since / self.epochs, 1.0) if self.epochs else self.most


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Fine-tuning of a base on the training text: all its weights, or low-rank additions that are merged into them."""

    method: Literal["full", "lora"] = "full"
    rank: int = 8  # r of LoRA
    alpha: int = 16  # its additions are scaled by alpha / rank
    targets: tuple[str, ...] = ()  # names of the layers that LoRA adapts; none given: all linear ones but the head
    # share of the training documents that it reads, the first ones; none given: all, or what a local mix counts.
    # Energies learn from the others where there are any
    documents: float | None = None
    block: int = 128  # tokens of a training row
    dropout: float = 0.0
    validation_tokens: int = 10_000  # of the validation text, read for early stopping
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(
            steps=200, batch_size=4, learning_rate=1e-4, warmup=10, weight_decay=0.01, validate_every=20, patience=3
        ),
        metadata=KEEP_DEFAULT,
    )

    def __post_init__(self) -> None:
        check_range(self, "rank", "alpha", "block", "validation_tokens", at_least=1)
        check_range(self, "documents", above=0, at_most=1)
        check_range(self, "dropout", at_least=0, below=1)
        if self.targets and self.method == "full":
            raise UserError('targets name the layers that LoRA adapts: set method = "lora", or leave them out')


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelLoss:
    """Cross-entropy, and what ``training.tasks.autoregressive`` adds to it, in any combination."""

    label_smoothing: float = 0.0
    level: float = 0.0  # weight of S², S = log Σ_v e^{logit v}: a softmax leaves the level of the logits free
    scheduled: ScheduledSampling | None = None
    earm: EARM | None = None

    def __post_init__(self) -> None:
        check_range(self, "level", at_least=0, hint=", the weight of the squared log-sum of logits")
        check_range(self, "label_smoothing", at_least=0, below=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedBase:
    """A checkpoint as it is: a named resource, a Hugging Face id, a folder or a GGUF file."""

    kind: Literal["pretrained"] = "pretrained"
    path: str
    tune: TuneSettings | None = None  # a stage of its own, after ``base``
    local: LocalSettings | None = None  # another, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNetwork:
    """How a network is taught and optimised; its sizes are elsewhere."""

    label_smoothing: float = 0.0
    level: float = 0.0  # weight of S², which holds the level of the logits near 0
    scheduled: ScheduledSampling | None = None  # rows that hold the network's own predictions
    earm: EARM | None = None  # the network learns to be an energy too
    optimisation: Optimisation = field(default_factory=Optimisation)

    def __post_init__(self) -> None:
        _ = self.lm_loss  # refuses what it cannot be

    @property
    def lm_loss(self) -> LanguageModelLoss:
        """Returns the loss of the network."""
        return LanguageModelLoss(
            label_smoothing=self.label_smoothing, level=self.level, scheduled=self.scheduled, earm=self.earm
        )


def tuning(base: Any) -> TuneSettings | None:
    """Returns how a base is tuned; None where it is not, or has no weights."""
    return base.tune if isinstance(base, TrainedBase | PretrainedBase) else None


def adaptation(base: Any) -> LocalSettings | None:
    """Returns how a base is adapted by a local mix; None where it is not, or does not show all its predictions."""
    return base.local if isinstance(base, TrainedBase | PretrainedBase | NgramBase) else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBase(TrainedNetwork):
    """A transformer trained on the corpus: from scratch by ``preset``, or fine-tuned from ``start``."""

    kind: Literal["train"] = "train"
    preset: str = "tiny"
    start: str = ""  # a checkpoint's path or name; then the preset is not used
    block: int = 160  # tokens of a training row
    dropout: float = 0.0
    memory: int = 0  # tokens before the block that are seen without gradient; the text is then read in its order
    validation_tokens: int = 50_000  # of the validation text, read for early stopping
    tune: TuneSettings | None = None  # a stage of its own, after ``base``
    local: LocalSettings | None = None  # another, after that

    def __post_init__(self) -> None:
        TrainedNetwork.__post_init__(self)
        check_range(self, "block", "validation_tokens", at_least=1)
        check_range(self, "dropout", at_least=0, below=1)
        check_range(self, "memory", at_least=0, hint=" tokens")
        if self.memory and self.optimisation.accumulate > 1:
            raise UserError("a memory continues from batch to batch, so a step is one batch: set accumulate to 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyTraining:
    """How an energy is trained.

    Energies that are linear in frozen features are fitted by L-BFGS, with the weight decay of ``l2`` that gains most on
    validation windows; networks take ``optimisation``. With ``lengths`` above 1 an energy learns to judge unfinished
    continuations too, so that it can steer while they are written: it is fitted at that many lengths, evenly spaced,
    the full length among them. ``curve`` also fits linear energies to a quarter and a half of the windows.
    """

    objective: BinaryNCE | RankingNCE = field(default_factory=RankingNCE)
    negatives: int = 4  # of each prefix, in one step of a network
    l2: tuple[float, ...] = (1e-3, 1e-2, 1e-1)  # tried for linear energies
    energy_l2: float = 0.0  # λ of λ·E², for networks
    lengths: int = 1  # of the continuation that an energy is fitted at
    curve: bool = False  # measure how the gain of linear energies grows with the windows
    rows: int = 128  # continuations that a network reads at once in validation
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(learning_rate=1e-4, validate_every=100, patience=5)
    )
    masked: Optimisation = field(default_factory=Optimisation)  # for a trunk that first learns to fill masks

    def __post_init__(self) -> None:
        check_range(self, "negatives", "lengths", "rows", at_least=1)
        check_range(self, "energy_l2", at_least=0)
        if not self.l2 or min(self.l2) < 0:
            raise UserError(f"l2 is {list(self.l2)}: give at least one number, none below 0")


def _paper(batch_size: int, warmup: int, steps: int, learning_rate: float, clip: float) -> dict[str, Any]:
    return {
        "batch_size": batch_size, "warmup": warmup, "steps": steps, "learning_rate": learning_rate, "clip": clip,
        "weight_decay": 0.0, "beta2": 0.999, "final_share": 0.0,
    }  # fmt: skip


def _earm(learning_rate: float, warmup: int, schedule: str, weight_decay: float) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate, "warmup": warmup, "schedule": schedule, "weight_decay": weight_decay,
        "beta2": 0.999,
    }  # fmt: skip


# Table 4 of Deng et al. (2020): Adam with a cosine; its mixed precision is ours on a GPU. A recipe says
# optimisation.preset = NAME and may change single keys after it.
PRESETS = {
    "paper-base-lm": _paper(32, 2_000, 180_000, 1e-4, 10.0),
    "paper-ralm": _paper(64, 2_000, 180_000, 1e-4, 10.0),
    "paper-balm": _paper(32, 2_000, 180_000, 1e-4, 10.0),
    "paper-unit": _paper(64, 2_000, 180_000, 3e-4, 10.0),
    "paper-bit-base": _paper(60, 2_000, 90_000, 5e-5, 0.25),
    "paper-bit-large": _paper(64, 2_000, 90_000, 3e-4, 10.0),
    "paper-base-lm-24l": _paper(50, 2_000, 90_000, 3e-4, 0.25),
    "paper-ralm-24l": _paper(28, 1_000, 90_000, 1.5e-4, 0.25),
    "paper-balm-24l": _paper(28, 2_000, 90_000, 3e-4, 0.25),
    "paper-unit-24l": _paper(64, 2_000, 180_000, 3e-4, 10.0),
    "paper-bit-base-24l": _paper(60, 2_000, 90_000, 5e-5, 0.25),
    "paper-bit-med-24l": _paper(32, 2_000, 90_000, 5e-5, 0.25),
    "paper-bit-large-24l": _paper(20, 2_000, 90_000, 5e-5, 0.25),
    # Table 6 of Wang et al. (2022), where training stops after 20 epochs without improvement
    "earm-tr-base": _earm(5e-4, 4_000, "inverse_sqrt", 1e-2),
    "earm-tr-xl": _earm(2.5e-4, 10_000, "cosine", 0.0),
    "earm-iwslt14": _earm(5e-4, 4_000, "inverse_sqrt", 1e-4),
    "earm-wmt16": _earm(1e-3, 4_000, "inverse_sqrt", 0.0),
}
