"""What the figures of the residual model are drawn from (Fig. 2, left, and Fig. 3 of Deng et al. 2020).

    curve at m draws:   log Z_m = mean over disjoint parts of m of the N stored draws
    densities:          log P_LM(x) / |x|,    log P(x) / |x| = (log P_LM(x) − E(x) − log Z) / |x|      nats per token

As m grows the lower perplexity rises to the truth and the certified one falls; where upper and lower meet, m suffices.
All rows come from the same draws, so the curve is smoother than its points are sure.

A model whose own text is as likely to it as real text is cannot be distinguished from it by likelihood. log Z is the
jackknife estimate from the window's draws (the lower one where a single draw has all the weight). The difference of
means is that of real text less that of the model's, window by window, with an interval over documents.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.scored import Scored
from freenergy.evaluation.certified import BOUNDS
from freenergy.evaluation.perplexity import Counts
from freenergy.partition import LogPartition, log_partition

TEXTS = ("human", "base", "joint")
MODELS = ("base", "joint")
_MOST_PARTS = 16  # of a window's draws; more would be slow and change nothing that is seen


def curve_numbers(scores: Scored) -> Float[Tensor, "W steps bounds"]:
    """log P of each true continuation from each number of draws by each bound: all of a window that the curve needs."""
    log_score = scores.log_score[:, :1]
    return torch.stack([log_score - _averaged(scores, m) for m in steps(scores.num - 1)], dim=1)


def draws_curve(
    log_p: Float[Tensor, "W steps bounds"], log_base: Float[Tensor, " W"], counts: Counts, draws: int
) -> list[dict[str, Any]]:
    """Rows with ``draws``, ``lower``, ``upper``, ``certified`` and ``base``, perplexities per token."""
    base = counts.perplexity(log_base.numpy()).value
    rows = []
    for i, m in enumerate(steps(draws)):
        found = {name: counts.perplexity(log_p[:, i, j].numpy()).value for j, name in enumerate(BOUNDS)}
        rows.append({"draws": m, **found, "base": base})
    return rows


def steps(draws: int) -> list[int]:
    """2, 4, 8, … and all of them.

    >>> steps(20)
    [2, 4, 8, 16, 20]
    """
    return [*(2**k for k in range(1, draws.bit_length()) if 2**k < draws), draws]


def _averaged(scores: Scored, m: int) -> Float[Tensor, "W bounds"]:
    """log Z of each window by each bound, from m draws, averaged over disjoint parts."""
    log_w, W, parts = scores.log_weight, len(scores), min((scores.num - 1) // m, _MOST_PARTS)
    drawn = log_w[:, 1 : 1 + parts * m].reshape(W * parts, m)
    found = log_partition(drawn)
    own = log_w[:, :1].expand(W, parts).reshape(W * parts)
    certified = torch.logaddexp(own, drawn.logsumexp(1)) - math.log(m + 1)
    by_part = {"lower": found.lower, "upper": found.upper, "certified": certified}
    return torch.stack([by_part[name].view(W, parts).mean(1) for name in BOUNDS], dim=1)


def density_numbers(
    scores: Scored, Z: LogPartition, chosen: dict[str, Int[Tensor, " W"]]
) -> Float[Tensor, "W models texts"]:
    """Return nats per token of the three texts of each window under base and residual model.

    ``chosen`` says which candidate of each window is base and residual text; candidate 0 is the human one.
    """
    log_z = torch.where(Z.jackknife.isfinite(), Z.jackknife, Z.lower).unsqueeze(1)
    columns = torch.stack([torch.zeros_like(chosen["base"]), chosen["base"], chosen["joint"]], dim=1)
    log_base, log_score, lengths = (
        table.gather(1, columns) for table in (scores.log_base, scores.log_score, scores.x.lengths.double())
    )
    return torch.stack([log_base / lengths, (log_score - log_z) / lengths], dim=1)


def densities(values: Float[Tensor, "W models texts"], counts: Counts) -> dict[str, Any]:
    """Values of each text under each model; ``difference_of_means[model][text]`` = [human − text, low, high]."""
    table = {model: {text: values[:, i, j].numpy() for j, text in enumerate(TEXTS)} for i, model in enumerate(MODELS)}
    differences = {
        model: {text: counts.mean(by["human"] - by[text]).to_json() for text in TEXTS[1:]}
        for model, by in table.items()
    }
    lists = {model: {text: found.tolist() for text, found in by.items()} for model, by in table.items()}
    return {**lists, "difference_of_means": differences}
