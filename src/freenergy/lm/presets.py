"""Sizes of language models that are trained here, and the networks built from them.

    parameters ≈ V·d + layers · (4·d² + 2·d·d_ff)        (embeddings tied to the output)

``paper-…`` and ``balm-…`` are Table 1 of Deng et al. (2020), for their vocabulary of 50,096. The paper gives d = 1,568
for BALM, which is 433 M parameters and not its 408 M; we keep the count, with the width of 16 equal heads that comes
nearest to it, as for the 24-layer models, whose width it does not give. ``tr-…`` are Table 6 of Wang et al. (2022).

What it costs to read a token follows from the configuration alone:

    FLOPs of a token with T tokens in sight = 2·W + 4·layers·a·T,      of its prediction + 2·d·V

W are the weights that every token is multiplied with (all linear layers but the one that predicts), a = heads · size of
a head. Attention is counted over all T; mixtures of experts do less than this says.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import nn

from freenergy.core.errors import UserError, first_line
from freenergy.core.files import corruption_as_user_error
from freenergy.core.rng import Rng

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@final
@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a decoder-only transformer."""

    family: Literal["neox", "gpt2"]  # rotary places and parallel layers; or learned places, as in the papers
    layers: int
    heads: int
    width: int
    feedforward: int
    context: int
    about: str

    def config(self, *, vocab_size: int, eos: int, dropout: float = 0.0) -> "PreTrainedConfig":
        """Return the Hugging Face configuration."""
        from transformers import GPT2Config, GPTNeoXConfig

        tokens: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": eos, "eos_token_id": eos}
        if self.family == "neox":
            return GPTNeoXConfig(
                hidden_size=self.width,
                intermediate_size=self.feedforward,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                max_position_embeddings=self.context,
                attention_dropout=dropout,
                hidden_dropout=dropout,
                tie_word_embeddings=True,
                **tokens,
            )
        return GPT2Config(
            n_embd=self.width,
            n_inner=self.feedforward,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.context,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **tokens,
        )


PRESETS = {  # family, layers, heads, width, feedforward, context, about
    "tiny": Preset("neox", 2, 4, 256, 1024, 256, "minutes on two cores"),
    "small": Preset("neox", 6, 8, 384, 1536, 512, "an hour on two cores"),
    "tr-base": Preset("gpt2", 6, 8, 512, 2048, 512, "Tr-Base of Wang et al. 2022"),
    "tr-xl": Preset("neox", 16, 10, 410, 2100, 512, "Tr-XL of Wang et al. 2022"),
    "paper-12l": Preset("gpt2", 12, 16, 1024, 4096, 256, "BASE LM of Deng et al. 2020, 203 M"),
    "paper-24l": Preset("gpt2", 24, 16, 752, 3008, 256, "BASE LM-24L of Deng et al. 2020, 203 M"),
    "balm-12l": Preset("gpt2", 12, 16, 1520, 6080, 256, "BALM of Deng et al. 2020, 408 M"),
    "balm-24l": Preset("gpt2", 24, 16, 1104, 4416, 256, "BALM-24L of Deng et al. 2020, 408 M"),
}


def preset(name: str) -> Preset:
    """Return the preset of this name."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def build(config: "PreTrainedConfig", rng: Rng) -> "PreTrainedModel":
    """Return a network with fresh weights; the global random state is left as it was."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(rng.integer())
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def set_dropout(model: "PreTrainedModel", probability: float) -> None:
    """Change the dropout of a loaded network everywhere."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = probability  # type: ignore[assignment]


def count_parameters(config: "PreTrainedConfig") -> int:
    """Return how many parameters a network would have, without allocating one."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


class Shape(NamedTuple):
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
        raise UserError(f"{folder} has no readable config ({first_line(error)}): give a checkpoint's folder") from None
    with corruption_as_user_error(folder, "give another checkpoint"):
        return shape_of(config)
