"""Training a causal language model on a stream of tokens.

    loss = − mean over places t of log P_θ(w_t | w_<t in the block),   with label smoothing ε:
    (1 − ε) · (that) + ε · mean over the vocabulary

Blocks of the stream do not overlap; each epoch cuts it at another offset and in another order, both from the seed.
"""

import math
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from freenergy.base.checkpoints import check_tokenizer, load_checkpoint
from freenergy.base.presets import build, preset, set_dropout
from freenergy.corpus import Corpus
from freenergy.errors import UserError
from freenergy.progress import Progress
from freenergy.protocols import Loss
from freenergy.randomness import Rng
from freenergy.training.loop import Validation, fit_watched, read_records
from freenergy.training.settings import TrainedBase


@final
class LanguageModelTask:
    """Next-token prediction, for the training loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: np.ndarray,
        validation: np.ndarray,
        *,
        block: int,
        batch_size: int,
        accumulate: int,
        label_smoothing: float,
        validation_tokens: int,
        rng: Rng,
    ) -> None:
        self.module = model
        self.label_smoothing = label_smoothing
        self.train = Blocks(train, block, rng.child("blocks"), name="training")
        self.validation = Blocks(validation[:validation_tokens], block, rng, name="validation")
        self.micro_size = batch_size // accumulate
        self.accumulate = accumulate

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Cross-entropy of one micro-batch."""
        first = ((step - 1) * self.accumulate + micro) * self.micro_size
        return Loss(self._cross_entropy(self.train.rows(first, self.micro_size), self.label_smoothing), {})

    def validate(self) -> Validation:
        """Mean cross-entropy over the validation stream, in nats a token, without smoothing."""
        total, count = 0.0, self.validation.whole
        for first in range(0, count, self.micro_size):
            rows = self.validation.in_order(first, min(first + self.micro_size, count))
            total += self._cross_entropy(rows, 0.0).item() * len(rows)
        return Validation(total / count)

    def _cross_entropy(self, rows: Int[Tensor, "rows block_plus_one"], label_smoothing: float) -> Tensor:
        rows = rows.to(self.module.device)
        logits = self.module(rows[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), label_smoothing=label_smoothing)


@final
class Blocks:
    """A stream of tokens cut into blocks, endlessly, every epoch at another offset and in another order."""

    def __init__(self, stream: np.ndarray, block: int, rng: Rng, *, name: str) -> None:
        if len(stream) < block + 1:
            raise UserError(
                f"the {name} text has {len(stream)} tokens, fewer than one block of {block + 1}: "
                "give more text or set base.block lower"
            )
        self.stream, self.block, self.rng = stream, block, rng
        self.whole = (len(stream) - 1) // block
        # one less leaves room for the offset, so that every epoch has the same number of blocks
        self.count = max(self.whole - 1, 1)
        self._epoch = -1
        self._order = torch.empty(0)
        self._offset = 0

    def __len__(self) -> int:
        return self.count

    def rows(self, first: int, size: int) -> Int[Tensor, "rows block_plus_one"]:
        """Rows first … first + size − 1 of the endless sequence of blocks."""
        return self._stack([self._start(index) for index in range(first, first + size)])

    def in_order(self, first: int, last: int) -> Int[Tensor, "rows block_plus_one"]:
        """Blocks first … last − 1 as they stand in the stream."""
        return self._stack([index * self.block for index in range(first, last)])

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            rng = self.rng.child("epoch", epoch)
            self._epoch, self._order = epoch, rng.permutation(self.count)
            spare = len(self.stream) - 1 - self.count * self.block
            self._offset = int(rng.child("offset").uniform(1).item() * (min(spare, self.block - 1) + 1))
        return self._offset + int(self._order[place]) * self.block

    def _stack(self, starts: list[int]) -> Int[Tensor, "rows block_plus_one"]:
        rows = [self.stream[start : start + self.block + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))


def train_language_model(
    settings: TrainedBase, corpus: Corpus, start: Path | None, folder: Path, rng: Rng, progress: Progress
) -> PreTrainedModel:
    """Train on a corpus, from a checkpoint or from scratch; the model with the best weights."""
    tokenizer, steps = corpus.tokenizer, settings.optimisation
    if start is None:
        config = preset(settings.preset).config(
            vocab_size=tokenizer.vocab_size, eos=tokenizer.eos, dropout=settings.dropout
        )
        model = build(config, rng.child("weights"))
    else:
        check_tokenizer(start, tokenizer)
        model, _ = load_checkpoint(start)
        set_dropout(model, settings.dropout)
    longest = getattr(model.config, "max_position_embeddings", settings.block)
    if max(settings.block, corpus.prefix + corpus.continuation) > longest:
        raise UserError(
            f"blocks of {settings.block} and windows of {corpus.prefix} + {corpus.continuation} tokens must fit the "
            f"network's {longest}: set base.block or corpus.prefix lower, or take a larger preset"
        )
    task = LanguageModelTask(
        model,
        corpus.stream("train"),
        corpus.stream("validation"),
        block=settings.block,
        batch_size=steps.batch_size,
        accumulate=steps.accumulate,
        label_smoothing=settings.label_smoothing,
        validation_tokens=settings.validation_tokens,
        rng=rng,
    )
    fit_watched(task, steps, folder, rng, progress, "training")
    return model


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
