"""Perplexity of the joint model against the number of draws (Fig. 2, left, of Deng et al. 2020).

    at m draws:   log Z_m = mean over disjoint parts of m of the N stored draws

As m grows the lower perplexity rises to the truth and the certified one falls; where upper and lower meet, m suffices.
All rows come from the same draws, so the curve is smoother than its points are sure.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.evaluation.scores import WindowScores
from freenergy.partition import log_partition

_MOST_PARTS = 16  # of a window's draws; more would be slow and change nothing that is seen


def draws_curve(scores: WindowScores) -> list[dict[str, Any]]:
    """Rows with ``draws``, ``lower``, ``upper``, ``certified`` and ``base``, perplexities per token."""
    perplexity, log_score = scores.counts.perplexity, scores.log_score[:, 0]
    base = perplexity(scores.log_base[:, 0].numpy()).value
    rows = []
    for m in steps(scores.draws):
        found = {name: perplexity((log_score - log_z).numpy()).value for name, log_z in _averaged(scores, m).items()}
        rows.append({"draws": m, **found, "base": base})
    return rows


def steps(draws: int) -> list[int]:
    """2, 4, 8, … and all of them.

    >>> steps(20)
    [2, 4, 8, 16, 20]
    """
    powers = [2**k for k in range(1, draws.bit_length()) if 2**k < draws]
    return [*powers, draws]


def _averaged(scores: WindowScores, m: int) -> dict[str, Float[Tensor, " W"]]:
    """log Z of each window by each bound, from m draws, averaged over disjoint parts."""
    log_w, W, parts = scores.log_weight, len(scores.counts), min(scores.draws // m, _MOST_PARTS)
    drawn = log_w[:, 1 : 1 + parts * m].reshape(W * parts, m)
    found = log_partition(drawn)
    own = log_w[:, :1].expand(W, parts).reshape(W * parts)
    certified = torch.logaddexp(own, drawn.logsumexp(1)) - math.log(m + 1)
    by_part = {"lower": found.lower, "upper": found.upper, "certified": certified}
    return {name: values.view(W, parts).mean(1) for name, values in by_part.items()}
