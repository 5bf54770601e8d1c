"""Fine-tuning of a base on training text.

    min over θ of − mean over blocks of log P_θ(block),     θ_0 = the weights of the base,  stopped early on validation

θ are all weights, or those that LoRA adds (``training.lora``). The weights of the base take part in early stopping as
step 0: where no step is better on validation text they are kept, so that tuning never gives a worse rung there.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.networks.blocks import BlockData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.lora import LoraNetwork
from freenergy.training.settings import LanguageModelLoss, TuneSettings
from freenergy.training.tasks.autoregressive import AutoregressiveTask
from freenergy.training.tasks.language_model import start_model, training_summary


def tune(
    settings: TuneSettings,
    corpus: Corpus,
    text: np.ndarray,
    start: Path,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Tune the checkpoint ``start``, or resume that, in ``folder``; return the network and what to record.

    ``text`` are the tokens of the training documents.
    """
    model = _loaded(settings, corpus, start, rng)
    network = LoraNetwork(model, settings, rng.child("lora")) if settings.method == "lora" else CausalNetwork(model)
    steps = settings.optimisation
    data = BlockData(
        text,
        corpus.stream("validation"),
        block=settings.block,
        batch_size=steps.batch_size,
        accumulate=steps.accumulate,
        known=0,
        validation_tokens=settings.validation_tokens,
        rng=rng,
    )
    task = AutoregressiveTask(network, data, LanguageModelLoss())
    weights = sum(weight.numel() for weight in network.module.parameters())
    before = _validated(task)
    fit_watched(task, steps, folder, rng, progress, "tuning")
    record = {"method": settings.method, "weights": weights, "validation_before": before}
    if tuning_summary(folder, before)["best_step"]:
        return (network.merge() if isinstance(network, LoraNetwork) else model), record
    progress.say(f"no step of tuning is better than the base ({before:.3f} nats per token): its weights are kept")
    return _loaded(settings, corpus, start, rng), record


def tuning_summary(folder: Path, before: float) -> dict[str, Any]:
    """How a finished tuning went, from its own records; ``before`` is the validation of step 0, in nats per token."""
    found = training_summary(folder)
    found["cpu_seconds"] = sum(record["cpu_seconds"] for record in read_records(folder))
    if found["validation_nats_per_token"] < before:
        return found
    perplexity = math.exp(min(before, 700.0))
    return found | {"best_step": 0, "validation_nats_per_token": before, "validation_perplexity": perplexity}


def _loaded(settings: TuneSettings, corpus: Corpus, start: Path, rng: Rng) -> PreTrainedModel:
    return start_model(
        corpus,
        start,
        rng,
        preset_name="",
        block=settings.block,
        dropout=settings.dropout if settings.method == "full" else 0.0,
        section="base.tune",
    )


@torch.no_grad()
def _validated(task: AutoregressiveTask) -> float:
    """Return the cross-entropy on validation text in nats per token, before the first step."""
    task.module.eval()
    return task.validate().value
