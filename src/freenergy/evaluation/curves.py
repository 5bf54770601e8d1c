"""Perplexity of the residual model against the number of draws (Fig. 2, left, of Deng et al. 2020).

    at m draws:   log Z_m = mean over disjoint parts of m of the N stored draws

As m grows the lower perplexity rises to the truth and the certified one falls; where upper and lower meet, m suffices.
All rows come from the same draws, so the curve is smoother than its points are sure.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.scored import Scored
from freenergy.evaluation.certified import BOUNDS
from freenergy.evaluation.perplexity import Counts
from freenergy.partition import log_partition

_MOST_PARTS = 16  # of a window's draws; more would be slow and change nothing that is seen


def draws_curve(scores: Scored, counts: Counts) -> list[dict[str, Any]]:
    """Rows with ``draws``, ``lower``, ``upper``, ``certified`` and ``base``, perplexities per token."""
    return curve_of(curve_numbers(scores), scores.log_base[:, 0], counts, scores.num - 1)


def curve_numbers(scores: Scored) -> Float[Tensor, "W steps bounds"]:
    """log P of each true continuation from each number of draws by each bound: all of a window that the curve needs."""
    log_score = scores.log_score[:, :1]
    return torch.stack([log_score - _averaged(scores, m) for m in steps(scores.num - 1)], dim=1)


def curve_of(
    log_p: Float[Tensor, "W steps bounds"], log_base: Float[Tensor, " W"], counts: Counts, draws: int
) -> list[dict[str, Any]]:
    """The curve from what was kept of the windows."""
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
    powers = [2**k for k in range(1, draws.bit_length()) if 2**k < draws]
    return [*powers, draws]


def _averaged(scores: Scored, m: int) -> Float[Tensor, "W bounds"]:
    """log Z of each window by each bound, from m draws, averaged over disjoint parts."""
    log_w, W, parts = scores.log_weight, len(scores), min((scores.num - 1) // m, _MOST_PARTS)
    drawn = log_w[:, 1 : 1 + parts * m].reshape(W * parts, m)
    found = log_partition(drawn)
    own = log_w[:, :1].expand(W, parts).reshape(W * parts)
    certified = torch.logaddexp(own, drawn.logsumexp(1)) - math.log(m + 1)
    by_part = {"lower": found.lower, "upper": found.upper, "certified": certified}
    return torch.stack([by_part[name].view(W, parts).mean(1) for name in BOUNDS], dim=1)
