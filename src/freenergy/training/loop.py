"""One loop trains everything.

    g = Σ over micro-batches of ∇ loss / accumulate,    g ← g · min(1, clip / ‖g‖),    θ ← AdamW(θ, g, lr(step))
    θ̄ ← d·θ̄ + (1 − d)·θ,   d = min(ema, (1 + step) / (10 + step))        (where ema > 0; θ̄ is validated and kept)

A task says what its loss is and how good it is; the loop does the rest and yields a record a step. Step s draws all its
randomness from ``rng.child("step", s)``, so a killed run goes on from its last checkpoint and ends with the same bits.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from freenergy.errors import DivergenceError
from freenergy.progress import Progress
from freenergy.protocols import Loss
from freenergy.randomness import Rng
from freenergy.storage import write_text
from freenergy.training.average import Average
from freenergy.training.checkpoint import TrainingState, restore, restore_weights, save, save_weights
from freenergy.training.settings import Optimisation


@final
@dataclass(frozen=True, slots=True)
class Validation:
    """The held-out value that early stopping watches, lower is better; and what a person wants to know beside it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """What is trained: a module, its loss on a micro-batch, and a number that should fall."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are optimised."""
        ...

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """The mean loss of one micro-batch; data are chosen by step and micro alone."""
        ...

    def validate(self) -> Validation:
        """How good the module is on held-out data."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A task that carries more than weights from step to step."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Live tensors: a checkpoint keeps them, and fills them again."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Step:
    """What happened in one step."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    metrics: dict[str, float]
    validation: float | None = None
    validation_metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False
    cpu_seconds: float = 0.0  # of all threads


def fit(task: Task, settings: Optimisation, folder: Path, rng: Rng) -> Iterator[Step]:
    """Train, or go on training, in ``folder``; after the last record the module holds the best weights.

    ``metrics.jsonl`` in the folder keeps every record.
    """
    optimiser = _optimiser(task.module, settings)
    average = Average(task.module, settings.ema)
    path, best = folder / "checkpoint.safetensors", folder / "best.safetensors"
    carried = task.state if isinstance(task, Stateful) else {}
    state = restore(path, task.module, optimiser, average, carried) if path.exists() else TrainingState()
    _rewind(folder / "metrics.jsonl", state.step)
    saved_at = time.monotonic()
    while state.step < settings.steps and not _is_exhausted(state, settings):
        state.step += 1
        record = _advance(task, optimiser, settings, state.step, rng)
        average.update(state.step)
        if state.step % settings.validate_every == 0 or state.step == settings.steps:
            record = _validated(task, record, state, average, best)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        if record.validation is not None or time.monotonic() - saved_at > settings.checkpoint_seconds:
            save(path, task.module, optimiser, average, state, carried)
            saved_at = time.monotonic()
        yield record
    restore_weights(best, task.module)


def fit_watched(
    task: Task,
    settings: Optimisation,
    folder: Path,
    rng: Rng,
    progress: Progress,
    label: str,
    line: Callable[[Step], str] = lambda record: f"loss {record.loss:.3f}",
) -> None:
    """``fit`` to its end, under a bar with a line of words."""
    with progress.track(label, settings.steps, "steps") as advance:
        last = 0
        for record in fit(task, settings, folder, rng):
            advance(record.step - last, line(record))
            last = record.step


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The record of every step of a finished training."""
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def _optimiser(module: nn.Module, settings: Optimisation) -> torch.optim.AdamW:
    """AdamW; vectors (norms and biases) are not decayed."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))


def _advance(task: Task, optimiser: torch.optim.Optimizer, settings: Optimisation, step: int, rng: Rng) -> Step:
    """One optimiser step."""
    begun, worked = time.monotonic(), time.process_time()
    rng = rng.child("step", step)
    task.module.train()
    optimiser.zero_grad()
    total, metrics = 0.0, dict[str, float]()
    with torch.random.fork_rng(), _autocast(task.module, settings.precision):
        torch.manual_seed(rng.integer())  # dropout's only source
        for micro in range(settings.accumulate):
            loss = task.loss(step, micro, rng.child("micro", micro))
            (loss.value / settings.accumulate).backward()
            total += loss.value.item() / settings.accumulate
            for name, value in loss.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value / settings.accumulate
    norm = nn.utils.clip_grad_norm_(task.module.parameters(), settings.clip or math.inf).item()
    if not math.isfinite(total + norm):
        raise _diverged(step, f"loss {total}, gradient norm {norm}")
    for group in optimiser.param_groups:
        group["lr"] = settings.learning_rate_at(step)
    optimiser.step()
    spent, cpu = time.monotonic() - begun, time.process_time() - worked
    return Step(step, total, settings.learning_rate_at(step), norm, spent, metrics, cpu_seconds=cpu)


def _autocast(module: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """bfloat16 where it is asked for, or gains: on a GPU. Most CPUs multiply it more slowly than float32."""
    device = next(module.parameters()).device.type
    if precision == "bfloat16" or (precision == "auto" and device == "cuda"):
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()


def _validated(task: Task, record: Step, state: TrainingState, average: Average, best: Path) -> Step:
    """Validate, and keep the weights if they are the best so far."""
    task.module.eval()
    with torch.no_grad(), average.in_place():
        found = task.validate()
        if not math.isfinite(found.value):
            raise _diverged(record.step, f"validation {found.value}")
        is_best = found.value < state.best_value
        if is_best:
            state.best_value, state.validations_since_best = found.value, 0
            save_weights(best, task.module)
        else:
            state.validations_since_best += 1
    return replace(record, validation=found.value, validation_metrics=found.metrics, is_best=is_best)


def _diverged(step: int, seen: str) -> DivergenceError:
    return DivergenceError(
        f"training diverged at step {step} ({seen}): lower the learning rate or lengthen the warm-up; "
        "checkpoints from before that step are kept"
    )


def _is_exhausted(state: TrainingState, settings: Optimisation) -> bool:
    return 0 < settings.patience <= state.validations_since_best


def _rewind(path: Path, step: int) -> None:
    """Forget records of steps that will be done again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(path, "".join(kept))
