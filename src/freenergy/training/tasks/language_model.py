"""Training a causal language model on a corpus.

    rows: the token before a block, and the block;   E-ARM's fakes share the first p tokens of a block,  p + K ≤ block

p is the corpus' prefix where K more tokens fit behind it, so that the energy is trained where it will be read.
"""

import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.checkpoints import check_tokenizer, load_checkpoint
from freenergy.lm.networks.blocks import BlockData, LaneData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.presets import build, preset, set_dropout
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.settings import TrainedBase
from freenergy.training.tasks.autoregressive import AutoregressiveTask


def train_language_model(
    settings: TrainedBase, corpus: Corpus, start: Path | None, folder: Path, rng: Rng, progress: Progress
) -> PreTrainedModel:
    """Train on a corpus, from a checkpoint or from scratch; the model with the best weights."""
    steps = settings.optimisation
    model = start_model(
        corpus,
        start,
        rng.child("weights"),
        preset_name=settings.preset,
        block=settings.block,
        dropout=settings.dropout,
        section="base",
    )
    network = CausalNetwork(model, memory=settings.memory, rows=steps.batch_size)
    task = AutoregressiveTask(network, _data(settings, corpus, rng), settings.lm_loss)
    task.check(steps.steps)
    fit_watched(task, steps, folder, rng, progress, "training")
    return model


def start_model(
    corpus: Corpus, start: Path | None, rng: Rng, *, preset_name: str, block: int, dropout: float, section: str
) -> PreTrainedModel:
    """A model for a corpus, with fresh weights or those of a checkpoint; ``section`` of the recipe has its block."""
    tokenizer = corpus.tokenizer
    if start is None:
        sizes = {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}
        model = build(preset(preset_name).config(dropout=dropout, **sizes), rng)
    else:
        check_tokenizer(start, tokenizer)
        model, _ = load_checkpoint(start)
        set_dropout(model, dropout)
    longest = getattr(model.config, "max_position_embeddings", block)
    if max(block, corpus.prefix + corpus.continuation) > longest:
        raise UserError(
            f"blocks of {block} and windows of {corpus.prefix} + {corpus.continuation} tokens must fit the "
            f"network's {longest}: set {section}.block or corpus.prefix lower, or take a larger preset"
        )
    return model


def _data(settings: TrainedBase, corpus: Corpus, rng: Rng) -> BlockData | LaneData:
    steps, streams = settings.optimisation, (corpus.stream("train"), corpus.stream("validation"))
    known = min(corpus.prefix, settings.block - settings.earm.length) if settings.earm else 0
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("block", "validation_tokens")}
    sizes |= {"known": max(known, 0), "batch_size": steps.batch_size}
    if settings.memory:
        return LaneData(*streams, **sizes)
    return BlockData(*streams, accumulate=steps.accumulate, rng=rng, **sizes)


def training_summary(folder: Path) -> dict[str, Any]:
    """How a finished training went, from its own records."""
    records = read_records(folder)
    best = [record for record in records if record["is_best"]][-1]
    return {
        "steps": records[-1]["step"],
        "best_step": best["step"],
        "validation_nats_per_token": best["validation"],
        "validation_perplexity": math.exp(min(best["validation"], 700.0)),
        "seconds_of_steps": sum(record["seconds"] for record in records),
    }
