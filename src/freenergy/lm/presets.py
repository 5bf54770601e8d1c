"""Sizes of language models that are trained here, and the networks built from them.

    parameters ≈ V·d + layers · (4·d² + 2·d·d_ff)        (embeddings tied to the output)

``paper-12l``, ``paper-24l``, ``balm-12l`` and ``balm-24l`` are the sizes of Table 1 of Deng et al. (2020), for their
vocabulary of 50,096. The paper gives d = 1,568 for BALM, which by this formula is 433 M parameters and not its 408 M;
we keep the count, and take the width of 16 equal heads that comes nearest to it. So do the 24-layer models, for which
the paper gives no width. ``tr-base`` and ``tr-xl`` are Table 6 of Wang et al. (2022); the second is meant for a memory.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

import torch

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
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

        if self.family == "neox":
            return GPTNeoXConfig(
                vocab_size=vocab_size,
                hidden_size=self.width,
                intermediate_size=self.feedforward,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                max_position_embeddings=self.context,
                attention_dropout=dropout,
                hidden_dropout=dropout,
                tie_word_embeddings=True,
                bos_token_id=eos,
                eos_token_id=eos,
            )
        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=self.width,
            n_inner=self.feedforward,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.context,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=eos,
            eos_token_id=eos,
        )


def _paper(layers: int, width: int, about: str) -> Preset:
    return Preset(family="gpt2", layers=layers, heads=16, width=width, feedforward=4 * width, context=256, about=about)


PRESETS = {
    "tiny": Preset(
        family="neox", layers=2, heads=4, width=256, feedforward=1024, context=256, about="minutes on two cores"
    ),
    "small": Preset(
        family="neox", layers=6, heads=8, width=384, feedforward=1536, context=512, about="an hour on two cores"
    ),
    "tr-base": Preset(
        family="gpt2", layers=6, heads=8, width=512, feedforward=2048, context=512, about="Tr-Base of Wang et al. 2022"
    ),
    "tr-xl": Preset(
        family="neox", layers=16, heads=10, width=410, feedforward=2100, context=512, about="Tr-XL of Wang et al. 2022"
    ),
    "paper-12l": _paper(12, 1024, "BASE LM of Deng et al. 2020, 203 M"),
    "paper-24l": _paper(24, 752, "BASE LM-24L of Deng et al. 2020, 203 M"),
    "balm-12l": _paper(12, 1520, "BALM of Deng et al. 2020, 408 M"),
    "balm-24l": _paper(24, 1104, "BALM-24L of Deng et al. 2020, 408 M"),
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
