"""Training of baselines on text, for the training loop, and what it costs.

    loss = − mean over places t of log P(w_t | w_<t in the block)          (exact: P sums to one at every place)

Predictions are made for some places at a time and are made again for the gradient, so that a large vocabulary costs
time and not memory. Blocks of the stream are those of ``training.tasks.language_model``.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.core.sequences import Sequences
from freenergy.corpus import Corpus
from freenergy.lm.networks.blocks import BlockData
from freenergy.lm.networks.protocol import Batch
from freenergy.training.baselines.residual import Places, ResidualLM
from freenergy.training.baselines.settings import TrainedBaseline
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.task import Task, Validation
from freenergy.training.tasks.language_model import corpus_blocks, training_summary

TRAINING = "training"


@final
class ResidualTask:
    """Maximum likelihood of a correction; the base stays as it is."""

    def __init__(self, model: ResidualLM, module: nn.Module, data: BlockData) -> None:
        self.model, self.module, self.data = model, module, data

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Cross-entropy of one micro-batch."""
        return Loss(cross_entropy(self.model, _rows(self.data.batch(step, micro))), {})

    def validate(self) -> Validation:
        """Mean cross-entropy over the validation stream, in nats per token."""
        total, count = 0.0, 0
        for rows in map(_rows, self.data.held_out()):
            total, count = total + cross_entropy(self.model, rows).item() * len(rows), count + len(rows)
        return Validation(total / count)


def _rows(batch: Batch) -> Int[Tensor, "R block_plus_one"]:
    return torch.cat([batch.given, batch.tokens], dim=1)


def cross_entropy(model: ResidualLM, rows: Int[Tensor, "R block_plus_one"]) -> Float[Tensor, ""]:
    """Mean − log P of every token but the first of each row."""
    rows = rows.to(model.device)
    read, tokens = rows[:, :-1], rows[:, 1:].flatten()
    R, T = read.shape
    log_probs = model.read(Sequences(read, torch.full((R,), T, device=model.device)))

    def part(at: Places, token: Tensor) -> Tensor:
        return -log_probs(at).gather(1, token.unsqueeze(1)).sum()

    everywhere, size = Places(*torch.ones_like(read).nonzero(as_tuple=True)), model.places_at_once
    parts = zip(everywhere.split(size), tokens.split(size), strict=True)
    losses = [checkpoint(part, at, token, use_reentrant=False, preserve_rng_state=False) for at, token in parts]
    return torch.stack(losses).sum() / len(tokens)


def train_baseline(
    settings: TrainedBaseline,
    task_of: Callable[[BlockData], Task],
    longest: int | None,
    corpus: Corpus,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> dict[str, Any]:
    """Train a task on blocks of the corpus to its end, by a network that reads ``longest`` tokens; how it went."""
    if longest is not None and max(settings.block, corpus.prefix + corpus.continuation) > longest:
        raise UserError(
            f"blocks of {settings.block} and windows of {corpus.prefix} + {corpus.continuation} tokens must fit the "
            f"{longest} of the network of the baseline {settings.name!r}: set its block or corpus.prefix lower"
        )
    steps, path = settings.optimisation, folder / TRAINING
    task = task_of(corpus_blocks(corpus, steps, settings.block, settings.validation_tokens, rng))
    fit_watched(task, steps, path, rng, progress, f"training {settings.name}")
    task.module.eval().requires_grad_(False)
    summary = training_summary(path)
    return {key: summary[key] for key in ("steps", "best_step", "validation_nats_per_token")} | {
        "tokens": summary["steps"] * steps.batch_size * settings.block,
        "cpu_seconds": math.fsum(record["cpu_seconds"] for record in read_records(path)),
    }
