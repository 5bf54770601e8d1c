"""Training a network to fill masks, in both directions.

    loss = − mean over chosen places t of log P_θ(w_t | w̃),      each place is chosen with probability ``mask_share``

In w̃ a chosen token is the mask with probability 0.8, any token with 0.1, and itself with 0.1 (Devlin et al. 2019). The
architecture is that of a causal preset with its mask removed; the vocabulary has one more token, V, which is the mask.
"""

from pathlib import Path
from typing import final

import numpy as np
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
from freenergy.energies.settings import MaskedTrunk
from freenergy.lm.networks.blocks import Blocks
from freenergy.lm.presets import build, preset
from freenergy.lm.shared_prefix import seeing_both_ways
from freenergy.training.loop import fit_watched
from freenergy.training.settings import Optimisation
from freenergy.training.task import Validation

VALIDATION_TOKENS = 50_000


@final
class MaskedLanguageModelTask:
    """Mask filling, for the training loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: np.ndarray,
        validation: np.ndarray,
        *,
        block: int,
        mask_share: float,
        optimisation: Optimisation,
        rng: Rng,
    ) -> None:
        self.module, self.mask_share, self.rng = model, mask_share, rng
        self.train = Blocks(train, block, rng.child("blocks"), name="training")
        self.validation = Blocks(validation[:VALIDATION_TOKENS], block, rng, name="validation")
        self.accumulate = optimisation.accumulate
        self.micro_size = optimisation.batch_size // optimisation.accumulate

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Cross-entropy at the chosen places of one micro-batch."""
        first = ((step - 1) * self.accumulate + micro) * self.micro_size
        total, count = self._losses(self.train.rows(first, self.micro_size)[:, :-1], rng)
        return Loss(total / max(count, 1), {})

    def validate(self) -> Validation:
        """Mean cross-entropy over the validation stream, in nats a chosen place; the same places each time."""
        total, places = 0.0, 0
        for first in range(0, self.validation.whole, self.micro_size):
            last = min(first + self.micro_size, self.validation.whole)
            rows = self.validation.in_order(first, last)[:, :-1]
            part, count = self._losses(rows, self.rng.child("validation", first))
            total, places = total + part.item(), places + count
        return Validation(total / max(places, 1))

    def _losses(self, tokens: Int[Tensor, "rows block"], rng: Rng) -> tuple[Float[Tensor, ""], int]:
        """The sum over chosen places, and how many there are."""
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
    settings: MaskedTrunk, corpus: Corpus, optimisation: Optimisation, folder: Path, rng: Rng, progress: Progress
) -> PreTrainedModel:
    """Train a network of ``settings.preset`` to fill masks on a corpus; the best weights, with the head.

    Its vocabulary is the corpus' and the mask, token V. Blocks are as long as a window: what the energy will read.
    """
    tokenizer, size = corpus.tokenizer, preset(settings.preset)
    block = corpus.prefix + corpus.continuation
    if block > size.context:
        raise UserError(
            f"windows of {corpus.prefix} + {corpus.continuation} tokens do not fit the {size.context} of the preset "
            f"{settings.preset!r}: set corpus.prefix lower, or take a larger preset"
        )
    config = size.config(vocab_size=tokenizer.vocab_size + 1, eos=tokenizer.eos, dropout=settings.dropout)
    model = build(config, rng.child("weights"))
    task = MaskedLanguageModelTask(
        model,
        corpus.stream("train"),
        corpus.stream("validation"),
        block=block,
        mask_share=settings.mask_share,
        optimisation=optimisation,
        rng=rng,
    )
    fit_watched(task, optimisation, folder, rng, progress, "learning to fill masks")
    return model
