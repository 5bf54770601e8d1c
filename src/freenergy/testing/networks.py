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
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = 4,
    eos: int = 0,
    spread: float = 0.4,
    fused: bool = False,
    **options: object,
) -> HuggingFaceLM:
    """Build two layers of 16 units with a context of 24 tokens; ``options`` override the configuration.

    Every weight, those of norms and biases too, is drawn from N(0, spread²).

    >>> tiny_network("GPT2").vocab_size
    4
    """
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "max_position_embeddings": 24}
    tokens = {"vocab_size": vocab_size, "bos_token_id": eos, "eos_token_id": eos, "pad_token_id": None}
    config = getattr(transformers, f"{name}Config")(**{**shape, **tokens, **ARCHITECTURES.get(name, {}), **options})
    model, generator = build(config, Rng(0)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, spread, generator=generator)
    torch.nn.Module.to(model, dtype)
    return HuggingFaceLM(model, eos=eos, fused=fused)
