"""How likely real text and text of both models are to the base and to the residual model (Fig. 3 of Deng et al. 2020).

    log P_LM(x) / |x|,      log P(x) / |x| = (log P_LM(x) − E(x) − log Z) / |x|        nats per token

A model whose own text is as likely to it as real text is cannot be distinguished from it by likelihood. log Z is the
jackknife estimate from the window's draws (the lower one where a single draw has all the weight). The difference of
means is that of real text less that of the model's, window by window, with an interval over documents.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.scored import Scored
from freenergy.evaluation.perplexity import Counts, measured_rate
from freenergy.partition import LogPartition, log_partition

TEXTS = ("human", "base", "joint")
MODELS = ("base", "joint")


def densities(scores: Scored, counts: Counts, chosen: dict[str, Int[Tensor, " W"]]) -> dict[str, Any]:
    """Values of each text under each model; ``chosen`` says which candidate of each window is base and residual text.

    Candidate 0 is the human one. ``difference_of_means[model][text]`` = [human − text, low, high].
    """
    return densities_of(density_numbers(scores, log_partition(scores.log_weight[:, 1:]), chosen), counts)


def density_numbers(
    scores: Scored, Z: LogPartition, chosen: dict[str, Int[Tensor, " W"]]
) -> Float[Tensor, "W models texts"]:
    """Return nats per token of the three texts of each window under base and residual model."""
    log_z = torch.where(Z.jackknife.isfinite(), Z.jackknife, Z.lower).unsqueeze(1)
    columns = torch.stack([torch.zeros_like(chosen["base"]), chosen["base"], chosen["joint"]], dim=1)
    log_base, log_score, lengths = (
        table.gather(1, columns) for table in (scores.log_base, scores.log_score, scores.x.lengths.double())
    )
    return torch.stack([log_base / lengths, (log_score - log_z) / lengths], dim=1)


def densities_of(values: Float[Tensor, "W models texts"], counts: Counts) -> dict[str, Any]:
    """The densities from what was kept of the windows."""
    table = {model: {text: values[:, i, j].numpy() for j, text in enumerate(TEXTS)} for i, model in enumerate(MODELS)}
    differences = {
        model: {text: _difference(counts, by["human"] - by[text]) for text in TEXTS[1:]} for model, by in table.items()
    }
    lists = {model: {text: found.tolist() for text, found in by.items()} for model, by in table.items()}
    return {**lists, "difference_of_means": differences}


def _difference(counts: Counts, apart: Float[np.ndarray, " W"]) -> list[float | None]:
    return measured_rate(counts.by_document(apart), counts.by_document(np.ones(len(apart)))).to_json()
