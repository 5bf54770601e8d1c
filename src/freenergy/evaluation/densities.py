"""How likely real, base and joint text are to the base and to the joint model (Fig. 3 of Deng et al. 2020).

    log P_LM(x) / |x|,      log P(x) / |x| = (log P_LM(x) − E(x) − log Z) / |x|        nats a token

A model whose own text is as likely to it as real text is cannot be told from it by likelihood. log Z is the jackknife
estimate from the window's draws (the lower one where a single draw has all the weight). The difference of means is that
of real text less that of the model's, window by window, with an interval over documents.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.evaluation.perplexity import measured_rate
from freenergy.evaluation.scores import WindowScores
from freenergy.partition import log_partition


def densities(scores: WindowScores, chosen: dict[str, Int[Tensor, " W"]]) -> dict[str, Any]:
    """Values of each text under each model; ``chosen`` names texts and says which candidate of each window is one.

    Candidate 0 is the human one. ``difference_of_means[model][text]`` = [human − text, low, high].
    """
    Z = log_partition(scores.log_weight[:, 1:])
    log_z = torch.where(Z.jackknife.isfinite(), Z.jackknife, Z.lower).unsqueeze(1)
    per_token = {"base": scores.log_base / scores.lengths, "joint": (scores.log_score - log_z) / scores.lengths}
    columns = {"human": torch.zeros(len(scores.counts), dtype=torch.long), **chosen}
    values = {
        model: {name: table.gather(1, column.unsqueeze(1)).squeeze(1).numpy() for name, column in columns.items()}
        for model, table in per_token.items()
    }
    differences = {
        model: {name: _difference(scores, by["human"] - by[name]) for name in chosen} for model, by in values.items()
    }
    lists = {model: {name: found.tolist() for name, found in by.items()} for model, by in values.items()}
    return {**lists, "difference_of_means": differences}


def _difference(scores: WindowScores, apart: Float[np.ndarray, " W"]) -> list[float | None]:
    by_document = scores.counts.by_document
    return measured_rate(by_document(apart), by_document(np.ones(len(apart)))).to_json()
