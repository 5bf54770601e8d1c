"""Tiny transformers of any architecture, with weights far enough from uniform that a wrong law shows."""

from typing import Final

import torch
import transformers

from freenergy.core.rng import Rng
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.presets import build

ARCHITECTURES: Final = {
    "GPT2": {},
    "GPTNeoX": {"intermediate_size": 32},
    "Llama": {"num_key_value_heads": 2, "intermediate_size": 32},
    "Mistral": {"num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 3},
    "Mamba": {"state_size": 4},
}


def tiny_network(
    name: str = "GPTNeoX",
    *,
    vocab_size: int = 4,
    eos: int = 0,
    sharpness: float = 5.0,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    **options: object,
) -> HuggingFaceLM:
    """Build two layers of 16 units with a context of 24 tokens; ``options`` override the configuration.

    Every weight is multiplied by ``sharpness``, which gives attention as peaked as in a trained model.

    >>> tiny_network("GPT2").vocab_size
    4
    """
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "max_position_embeddings": 24}
    tokens = {"vocab_size": vocab_size, "bos_token_id": eos, "eos_token_id": eos, "pad_token_id": None}
    config = getattr(transformers, f"{name}Config")(**{**shape, **tokens, **ARCHITECTURES[name], **options})
    model = build(config, Rng(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(sharpness)
    torch.nn.Module.to(model, dtype)
    return HuggingFaceLM(model, eos=eos, fused=fused)
