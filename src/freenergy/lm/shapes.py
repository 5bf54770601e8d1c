"""What it costs a transformer to read a token, from its configuration alone.

    FLOPs of a token with T tokens in sight = 2·W + 4·layers·a·T,      of its prediction + 2·d·V

W are the weights that every token is multiplied with (all linear layers but the one that predicts), a = heads · size of
a head, d the width of a state, V the vocabulary. Attention is counted over all T, as kernels without a causal shortcut
compute it. Networks whose tokens choose among experts do less than this says.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a transformer that costs depend on."""

    layers: int
    attention: int  # a
    width: int  # d
    weights: int  # W
    parameters: int  # with embeddings
    vocab_size: int  # V

    def reading(self, tokens: float | int, seen: float | int) -> float:
        """Return the FLOPs to read ``tokens`` tokens, each with ``seen`` tokens in sight."""
        return tokens * (2.0 * self.weights + 4.0 * self.layers * self.attention * seen)

    def predicting(self, tokens: float | int) -> float:
        """Return the FLOPs of the logits of ``tokens`` tokens."""
        return tokens * 2.0 * self.width * self.vocab_size


def shape_of(config: "PreTrainedConfig") -> Shape:
    """Return the shape of a network with this configuration; nothing is allocated."""
    from transformers import AutoModel
    from transformers.pytorch_utils import Conv1D

    text = config.get_text_config()
    with torch.device("meta"):
        trunk = AutoModel.from_config(config)
    linear = [module for module in trunk.modules() if isinstance(module, nn.Linear | Conv1D)]
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        layers=text.num_hidden_layers,
        attention=heads * size,
        width=text.hidden_size,
        weights=sum(module.weight.numel() for module in linear),
        parameters=sum(weight.numel() for weight in trunk.parameters()),
        vocab_size=text.vocab_size,
    )


def shape_in(folder: Path) -> Shape:
    """Return the shape of a checkpoint."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"the configuration in {folder} cannot be read ({reason}): give a checkpoint's folder"
        ) from None
    with corruption_as_user_error(folder, "give another checkpoint"):
        return shape_of(config)
