"""One loop trains everything.

    g = Σ over micro-batches of ∇ loss / accumulate,    g ← g · min(1, clip / ‖g‖),    θ ← AdamW(θ, g, lr(step))
    θ̄ ← d·θ̄ + (1 − d)·θ,   d = min(ema, (1 + step) / (10 + step))        (where ema > 0; θ̄ is validated and kept)

A task says what its loss is and how good it is; the loop does the rest and yields a record per step. Micro-batch m of
step s draws all its randomness from ``rng.child("step", s).child("micro", m)``, so a killed run resumes from its last
checkpoint and ends with the same bits, and several ranks (``training.distributed``) do together what one would have
done. The first of them writes. Asked to stop, all end after the step in hand, with a checkpoint.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from freenergy.core.errors import DivergenceError
from freenergy.core.files import corruption_as_user_error, flush, write_text
from freenergy.core.progress import Interrupted, Progress, stop_requested
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.training import checkpoint
from freenergy.training.checkpoint import Average, TrainingState
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.distributed.wrap import DistributedTask, distributed
from freenergy.training.settings import Optimisation
from freenergy.training.task import Grouped, Stateful, Task, parameter_groups

_BEST, _RECORDS = "best.safetensors", "metrics.jsonl"
_AGAIN = "delete its folder and train again"


@final
@dataclass(frozen=True, slots=True)
class StepRecord:
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
    cpu_seconds: float = 0.0  # of all threads and ranks


def fit(task: Task, settings: Optimisation, folder: Path, rng: Rng) -> Iterator[StepRecord]:
    """Trains, or resumes training, in ``folder``; after the last record the module holds the best weights.

    ``metrics.jsonl`` in the folder keeps every record. Under a launcher all ranks call this.
    """
    ranks = Ranks.found()
    ranks.share(settings.accumulate)  # refused before anything is touched
    with distributed(task, ranks) as together:
        yield from _steps(together, settings, folder, rng)
        ranks.barrier()  # the best weights are on disk
    checkpoint.restore_weights(folder / _BEST, task.module)
    ranks.barrier()  # and may be removed


def _steps(together: DistributedTask, settings: Optimisation, folder: Path, rng: Rng) -> Iterator[StepRecord]:
    """Yields a record per step, from the last checkpoint on."""
    task, ranks = together.task, together.ranks
    groups = task.parameter_groups(settings) if isinstance(task, Grouped) else parameter_groups(task.module, settings)
    optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))
    average = Average(task.module, settings.ema)
    path, records = folder / "checkpoint.safetensors", folder / _RECORDS
    carried = task.state if isinstance(task, Stateful) else {}
    state = checkpoint.restore(path, task.module, optimiser, average, carried) if path.exists() else TrainingState()
    if ranks.is_first:
        _rewind(records, state.step)
    saved_at = time.monotonic()
    while state.step < settings.steps and not 0 < settings.patience <= state.validations_since_best:
        state.step += 1
        record = _advance(together, optimiser, settings, state.step, rng)
        average.update(state.step)
        if state.step % settings.validate_every == 0 or state.step == settings.steps:
            record = _validated(together, record, state, average, folder / _BEST)
        if ranks.is_first:
            with records.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        is_late = time.monotonic() - saved_at > settings.checkpoint_seconds
        is_late, is_stopped = ranks.any(is_late, stop_requested())
        if record.validation is not None or is_late or is_stopped:
            if ranks.is_first:
                flush(records)  # a checkpoint that outlives a power cut has the records of its steps
            checkpoint.save(path, task.module, optimiser, average, state, carried, ranks)
            saved_at = time.monotonic()
        yield record
        if is_stopped:
            raise Interrupted


def fit_watched(
    task: Task,
    settings: Optimisation,
    folder: Path,
    rng: Rng,
    progress: Progress,
    label: str,
    line: Callable[[StepRecord], str] = lambda record: f"loss {record.loss:.3f}",
) -> None:
    """``fit`` to its end, under a bar with a line of words, which the first rank has."""
    is_first = Ranks.found().is_first
    with progress.track(label, settings.steps, "steps") as advance:
        last = 0
        for record in fit(task, settings, folder, rng):
            if is_first:
                with suppress(Interrupted):  # all ranks stop after the same step, and only ``fit`` knows which
                    advance(record.step - last, line(record))
            last = record.step


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The record of every step of a finished training."""
    path = folder / _RECORDS
    with corruption_as_user_error(path, _AGAIN):
        found = [dict(json.loads(text)) for text in path.read_text().splitlines()]
        if [record["step"] for record in found] != list(range(1, len(found) + 1)):
            raise ValueError("steps are missing")
    return found


def _advance(
    together: DistributedTask, optimiser: torch.optim.Optimizer, settings: Optimisation, step: int, rng: Rng
) -> StepRecord:
    """One optimiser step."""
    started, cpu_started = time.monotonic(), time.process_time()
    task, ranks = together.task, together.ranks
    rng = rng.child("step", step)
    task.module.train()
    optimiser.zero_grad()
    seed, micros, losses = rng.integer(), ranks.share(settings.accumulate), list[Loss]()
    with torch.random.fork_rng(), _autocast(task.module, settings.precision):
        for micro in micros:
            torch.manual_seed(seed + micro)  # dropout's only source
            own, is_last = rng.child("micro", micro), micro == micros[-1]
            losses.append(together.backward(step, micro, own, share=len(micros), is_last=is_last))
    total, metrics, statistics = _over_micros(losses, ranks)
    if isinstance(task, Stateful):
        task.settle(step, statistics)
    norm = float(checkpoint.whole_tensor(nn.utils.clip_grad_norm_(task.module.parameters(), settings.clip or math.inf)))
    if not math.isfinite(total + norm):
        raise _diverged(step, f"loss {total}, gradient norm {norm}")
    for group in optimiser.param_groups:
        group["lr"] = settings.learning_rate_at(step) * group["rate"]
    optimiser.step()
    spent, cpu = time.monotonic() - started, torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
    cpu_seconds = ranks.everyone(cpu).sum().item()
    return StepRecord(step, total, settings.learning_rate_at(step), norm, spent, metrics, cpu_seconds=cpu_seconds)


def _over_micros(losses: list[Loss], ranks: Ranks) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Mean loss and metrics over the micro-batches of all ranks; statistics of every one of them."""
    names = list(losses[0].metrics)
    rows = [[loss.value.item(), *(loss.metrics[name] for name in names)] for loss in losses]
    total, *means = ranks.micros(torch.tensor(rows, dtype=torch.float64)).mean(0).tolist()
    statistics = {
        name: ranks.micros(torch.stack([loss.statistics[name] for loss in losses])) for name in losses[0].statistics
    }
    return total, dict(zip(names, means, strict=True)), statistics


def _autocast(module: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """bfloat16 where it is asked for, or gains: on a GPU. Most CPUs multiply it more slowly than float32."""
    device = next(module.parameters()).device.type
    if precision == "bfloat16" or (precision == "auto" and device == "cuda"):
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()


def _validated(
    together: DistributedTask, record: StepRecord, state: TrainingState, average: Average, best: Path
) -> StepRecord:
    """Validate, and keep the weights if they are the best so far; the first rank decides."""
    task, ranks = together.task, together.ranks
    task.module.eval()
    with torch.no_grad(), average.in_place():
        found = together.whole.validate()
        value = ranks.of_first(found.value)
        if not math.isfinite(value):
            raise _diverged(record.step, f"validation {value}")
        is_best = value < state.best_value
        if is_best:
            state.best_value, state.validations_since_best = value, 0
            checkpoint.save_weights(best, task.module, ranks)
        else:
            state.validations_since_best += 1
    return replace(record, validation=value, validation_metrics=found.metrics, is_best=is_best)


def _diverged(step: int, seen: str) -> DivergenceError:
    return DivergenceError(
        f"training diverged at step {step} ({seen}): lower the learning rate or lengthen the warm-up; "
        "checkpoints from before that step are kept"
    )


def _rewind(path: Path, step: int) -> None:
    """Forget records of steps that will be done again."""
    with corruption_as_user_error(path, _AGAIN):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(path, "".join(kept))
