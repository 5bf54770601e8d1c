"""The page that travels with a saved residual model: what it is, how it was made and measured, how to load it."""

from typing import Any

import torch

from freenergy.models.residual import Residual

_FRONT = """---
library_name: freenergy
pipeline_tag: text-generation
tags: [energy-based-model, residual-ebm]
---
"""


def model_card(model: Residual, facts: dict[str, Any]) -> str:
    """Markdown with Hugging Face's front matter; ``facts`` become a list, nested ones indented."""
    base, energy = model.base, model.energy
    trainable = energy.parameters() if isinstance(energy, torch.nn.Module) else ()
    parameters = sum(weight.numel() for weight in trainable)
    told = "\n".join(_lines(facts)) if facts else "- none were recorded when the pair was saved"
    return f"""{_FRONT}
# A residual model of text

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

P_LM is a `{type(base).__name__}`, E a `{type(energy).__name__}` with {parameters:,} parameters. The energy reads a
whole continuation at once and was trained by noise-contrastive estimation against samples of P_LM (Deng et al., 2020,
Residual Energy-Based Models for Text Generation).

## Load it

    from freenergy import ResidualModel
    model = ResidualModel.from_pretrained("this-folder")

## What is known of it

{told}

## What it is not

`log_score` is not normalised: it ranks continuations of one prefix, and does not compare between prefixes. The energy
was trained for this base and this tokenizer, and for continuations of the length given above; elsewhere nothing is
promised. It writes what its training text taught it, and may be wrong.
"""


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}- {_words(name)}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}- {_words(name)}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines


def _words(name: str) -> str:
    return name.replace("_", " ")
