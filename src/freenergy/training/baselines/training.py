"""Training of baselines on text, for the training loop, and what it costs.

    loss = − mean over places t of log P(w_t | w_<t in the block)          (exact: P sums to one at every place)

Predictions are made for some places at a time and are made again for the gradient, so that a large vocabulary costs
time and not memory. Blocks of the stream are those of ``training.tasks.language_model``.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.core.sequences import Sequences
from freenergy.corpus import Corpus
from freenergy.lm.networks.blocks import BlockData, Blocks
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.training.baselines.reading import Places
from freenergy.training.baselines.residual import ResidualLM
from freenergy.training.baselines.settings import BalmBaseline, LocalBaseline, LongerBaseline, RalmBaseline
from freenergy.training.lm_loss import LanguageModelLoss
from freenergy.training.loop import StepRecord, fit_watched
from freenergy.training.task import Task, Validation
from freenergy.training.tasks.autoregressive import AutoregressiveTask
from freenergy.training.tasks.language_model import training_summary

TRAINING, _CPU = "training", "cpu.jsonl"
Trained = LongerBaseline | BalmBaseline | RalmBaseline | LocalBaseline


@final
class ResidualTask:
    """Maximum likelihood of a correction; the base stays as it is."""

    def __init__(self, model: ResidualLM, module: nn.Module, corpus: Corpus, settings: Trained, rng: Rng) -> None:
        self.model, self.module = model, module
        stream, held_out = corpus.stream("train"), corpus.stream("validation")[: settings.validation_tokens]
        self.train = Blocks(stream, settings.block, rng.child("blocks"), name="training")
        self.validation = Blocks(held_out, settings.block, rng, name="validation")
        self.accumulate = settings.optimisation.accumulate
        self.micro_size = settings.optimisation.batch_size // self.accumulate

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Cross-entropy of one micro-batch."""
        first = ((step - 1) * self.accumulate + micro) * self.micro_size
        return Loss(cross_entropy(self.model, self.train.rows(first, self.micro_size)), {})

    def validate(self) -> Validation:
        """Mean cross-entropy over the validation stream, in nats per token."""
        total, count = 0.0, self.validation.whole
        for first in range(0, count, self.micro_size):
            rows = self.validation.in_order(first, min(first + self.micro_size, count))
            total += cross_entropy(self.model, rows).item() * len(rows)
        return Validation(total / count)


def cross_entropy(model: ResidualLM, rows: Int[Tensor, "R block_plus_one"]) -> Float[Tensor, ""]:
    """Mean − log P of every token but the first of each row."""
    rows = rows.to(model.device)
    read, tokens = rows[:, :-1], rows[:, 1:].flatten()
    R, T = read.shape
    log_probs = model.read(Sequences(read, torch.full((R,), T, device=model.device)))

    def part(at: Places, token: Tensor) -> Tensor:
        return -log_probs(at).gather(1, token.unsqueeze(1)).sum()

    size = model.places_at_once
    parts = zip(Places.all(R, T, model.device).split(size), tokens.split(size), strict=True)
    losses = [checkpoint(part, at, token, use_reentrant=False, preserve_rng_state=False) for at, token in parts]
    return torch.stack(losses).sum() / len(tokens)


def train_network(
    model: PreTrainedModel,
    settings: LongerBaseline | BalmBaseline,
    corpus: Corpus,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> dict[str, Any]:
    """A language model by itself, on the same blocks as the base."""
    steps = settings.optimisation
    check_block(settings, corpus, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    data = BlockData(
        corpus.stream("train"),
        corpus.stream("validation"),
        block=settings.block,
        batch_size=steps.batch_size,
        accumulate=steps.accumulate,
        known=0,
        validation_tokens=settings.validation_tokens,
        rng=rng,
    )
    task = AutoregressiveTask(CausalNetwork(model), data, LanguageModelLoss())
    return train_task(task, settings, folder, rng, progress)


def train_correction(
    model: ResidualLM,
    module: nn.Module,
    settings: RalmBaseline | LocalBaseline,
    corpus: Corpus,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> dict[str, Any]:
    """One of the model's corrections."""
    check_block(settings, corpus, model.max_length)
    task = ResidualTask(model, module, corpus, settings, rng)
    return train_task(task, settings, folder, rng, progress)


def train_task(task: Task, settings: Trained, folder: Path, rng: Rng, progress: Progress) -> dict[str, Any]:
    """The loop to its end; how it went, from its own records."""
    steps, path = settings.optimisation, folder / TRAINING
    fit_watched(task, steps, path, rng, progress, f"training {settings.name}", _metered(path / _CPU))
    task.module.eval().requires_grad_(False)
    record = training_summary(path)
    keys = ("steps", "best_step", "validation_nats_per_token")
    tokens = record["steps"] * steps.batch_size * settings.block
    return {key: record[key] for key in keys} | {"tokens": tokens, "cpu_seconds": _spent(path / _CPU)}


def check_block(settings: Trained, corpus: Corpus, longest: int | None) -> None:
    """Refuse blocks and windows that the network cannot read."""
    if longest is not None and max(settings.block, corpus.prefix + corpus.continuation) > longest:
        raise UserError(
            f"blocks of {settings.block} and windows of {corpus.prefix} + {corpus.continuation} tokens must fit the "
            f"{longest} of the network of the baseline {settings.name!r}: set its block or corpus.prefix lower"
        )


def _metered(path: Path) -> Callable[[StepRecord], str]:
    """The live line; on the way it writes down the CPU time of every step, so that a kill loses none of it."""
    last = time.process_time()

    def line(record: StepRecord) -> str:
        nonlocal last
        now = time.process_time()
        with path.open("a") as file:
            file.write(json.dumps({"step": record.step, "cpu_seconds": now - last}) + "\n")
        last = now
        return f"loss {record.loss:.3f}"

    return line


def _spent(path: Path) -> float:
    """CPU seconds of all steps; one that was done again after a kill counts once."""
    seconds: dict[int, float] = {}
    for text in path.read_text().splitlines():
        try:
            record = json.loads(text)
            seconds[record["step"]] = record["cpu_seconds"]
        except json.JSONDecodeError:  # a line that a kill has cut
            continue
    return sum(seconds.values())
