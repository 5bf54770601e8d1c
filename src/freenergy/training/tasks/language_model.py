"""Training a language model on a corpus: causal, or one that fills masks in both directions.

Causal: rows are the token before a block, and the block; E-ARM's fakes share the first p tokens of a block, p + K ≤
block. p is the corpus' prefix where K more tokens fit behind it, so that the energy is trained where it will be read.

Masked:

    loss = − mean over chosen places t of log P_θ(w_t | w̃),      each place is chosen with probability ``mask_share``

In w̃ a chosen token is the mask with probability 0.8, any token with 0.1, and itself with 0.1 (Devlin et al. 2019). The
architecture is that of a causal preset with its mask removed; the vocabulary has one more token, V, which is the mask.
"""

import math
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.corpus import Corpus
from freenergy.lm.checkpoints import check_tokenizer, load_checkpoint
from freenergy.lm.networks.blocks import BlockData, LaneData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.networks.protocol import Batch
from freenergy.lm.presets import build, preset, set_dropout
from freenergy.lm.shared_prefix import seeing_both_ways
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.settings import Optimisation, TrainedBase
from freenergy.training.task import Validation
from freenergy.training.tasks.autoregressive import AutoregressiveTask

VALIDATION_TOKENS = 50_000  # of the validation text, for a network that fills masks


def train_language_model(
    settings: TrainedBase, corpus: Corpus, start: Path | None, folder: Path, rng: Rng, progress: Progress
) -> PreTrainedModel:
    """Train on a corpus, from a checkpoint or from scratch; the model with the best weights."""
    steps = settings.optimisation
    sizes: dict[str, Any] = {"block": settings.block, "dropout": settings.dropout}
    model = start_model(corpus, start, rng.child("weights"), preset_name=settings.preset, **sizes, section="base")
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


def corpus_blocks(
    corpus: Corpus, steps: Optimisation, block: int, validation_tokens: int, rng: Rng, *, known: int = 0
) -> BlockData:
    """Blocks of a corpus, in random order, for steps of this size."""
    return BlockData(
        corpus.stream("train"),
        corpus.stream("validation"),
        block=block,
        batch_size=steps.batch_size,
        accumulate=steps.accumulate,
        known=known,
        validation_tokens=validation_tokens,
        rng=rng,
    )


def _data(settings: TrainedBase, corpus: Corpus, rng: Rng) -> BlockData | LaneData:
    steps, block, tokens = settings.optimisation, settings.block, settings.validation_tokens
    known = max(min(corpus.prefix, block - settings.earm.length), 0) if settings.earm else 0
    if not settings.memory:
        return corpus_blocks(corpus, steps, block, tokens, rng, known=known)
    sizes = {"block": block, "batch_size": steps.batch_size, "known": known, "validation_tokens": tokens}
    return LaneData(corpus.stream("train"), corpus.stream("validation"), **sizes)


@final
class MaskedLanguageModelTask:
    """Mask filling, for the training loop."""

    def __init__(self, model: PreTrainedModel, data: BlockData, *, mask_share: float, rng: Rng) -> None:
        self.module, self.data, self.mask_share, self.rng = model, data, mask_share, rng

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Cross-entropy at the chosen places of one micro-batch."""
        total, count = self._losses(self.data.batch(step, micro), rng)
        return Loss(total / max(count, 1), {})

    def validate(self) -> Validation:
        """Mean cross-entropy over the validation stream, in nats per chosen place; the same places each time."""
        total, places = 0.0, 0
        for i, batch in enumerate(self.data.held_out()):
            part, count = self._losses(batch, self.rng.child("validation", i * self.data.micro_size))
            total, places = total + part.item(), places + count
        return Validation(total / max(places, 1))

    def _losses(self, batch: Batch, rng: Rng) -> tuple[Float[Tensor, ""], int]:
        """The sum over chosen places, and how many there are."""
        tokens = torch.cat([batch.given, batch.tokens[:, :-1]], dim=1)
        # the mask is the last token of the network's vocabulary
        masked, chosen = hide(tokens, share=self.mask_share, mask=self.module.config.vocab_size - 1, rng=rng)
        device = self.module.device
        lengths = torch.full((len(tokens),), tokens.shape[1], device=device)
        with seeing_both_ways(self.module, lengths):
            logits = self.module(masked.to(device), use_cache=False).logits
        targets = tokens[chosen].to(device)
        return cross_entropy(logits[chosen.to(device)], targets, reduction="sum"), len(targets)


def hide(
    tokens: Int[Tensor, "rows block"], *, share: float, mask: int, rng: Rng
) -> tuple[Int[Tensor, "rows block"], Bool[Tensor, "rows block"]]:
    """The text with masks in it, and the places that were chosen; ``mask`` is the token after the last real one."""
    chosen = rng.child("chosen").uniform(*tokens.shape) < share
    kind, other = rng.child("kind").uniform(*tokens.shape), rng.child("other").uniform(*tokens.shape)
    masked = torch.where(chosen & (kind < 0.8), mask, tokens)
    return torch.where(chosen & (kind >= 0.9), (other * mask).long(), masked), chosen


def train_masked_trunk(
    preset_name: str,
    corpus: Corpus,
    optimisation: Optimisation,
    folder: Path,
    rng: Rng,
    progress: Progress,
    *,
    mask_share: float,
    dropout: float = 0.0,
) -> PreTrainedModel:
    """Train a network of a preset to fill masks on a corpus; the best weights, with the head.

    Its vocabulary is the corpus' and the mask, token V. Blocks are as long as a window: what the energy will read.
    """
    tokenizer, size = corpus.tokenizer, preset(preset_name)
    block = corpus.prefix + corpus.continuation
    if block > size.context:
        raise UserError(
            f"windows of {corpus.prefix} + {corpus.continuation} tokens do not fit the {size.context} of the preset "
            f"{preset_name!r}: set corpus.prefix lower, or take a larger preset"
        )
    config = size.config(vocab_size=tokenizer.vocab_size + 1, eos=tokenizer.eos, dropout=dropout)
    model = build(config, rng.child("weights"))
    data = corpus_blocks(corpus, optimisation, block, VALIDATION_TOKENS, rng)
    task = MaskedLanguageModelTask(model, data, mask_share=mask_share, rng=rng)
    fit_watched(task, optimisation, folder, rng, progress, "learning to fill masks")
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
