"""Checkpoints whose embedding has more rows than the tokenizer has tokens (Pythia, Qwen and others pad it).

    P(v | c) = e^{l_v} / Σ_{u < V} e^{l_u},      v < V, the size of the tokenizer

No text has such a token, so a draw of one would not be a text, and an energy would tell it from data at once. The rows
are left out: predictions are renormalised over the tokens that exist, and draws, scores and spaces agree on V.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel


class Padding(NamedTuple):
    """The rows that were left out, and their probability at the start of a document."""

    rows: int = 0
    mass: float = 0.0


@torch.no_grad()
def without_padding(model: PreTrainedModel, vocab_size: int | None, eos: int) -> Padding:
    """Leave out the rows of a model's embeddings from ``vocab_size`` on, in place; None keeps all."""
    rows: int = model.config.get_text_config().vocab_size
    if vocab_size is None or rows <= vocab_size:
        return Padding()
    logits = model(torch.tensor([[eos]], device=model.device)).logits[0, -1].double()
    mass = float(logits.softmax(0)[vocab_size:].sum())
    model.resize_token_embeddings(vocab_size)
    return Padding(rows - vocab_size, mass)
