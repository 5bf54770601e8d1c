"""How near a distilled policy π has come to the joint model P, and what its draws are worth as candidates.

    n draws of P_LM and m of π are draws of the mixture  q = (n·P_LM + m·π)/(n + m),      w = P_LM · e^{−E} / q

On them KL and total variation are told of both models (``training.distil.distances``): so the difference between the
two is a paired one, and neither is judged by its own draws alone. No w is far above those of the better half. As
candidates for resampling from P, draws of the base weigh e^{−E} and draws of π weigh P_LM · e^{−E} / π.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.evaluation.perplexity import Counts, Measurement, measured_rate
from freenergy.partition import LogPartition, log_partition
from freenergy.training.distil import Distances, distances


class Scored(NamedTuple):
    """W windows with m strings each, the true one first, under both models."""

    log_base: Float[Tensor, "W m"]
    log_pi: Float[Tensor, "W m"]
    energy: Float[Tensor, "W m"]

    @property
    def log_score(self) -> Float[Tensor, "W m"]:
        """log P_LM − E."""
        return self.log_base - self.energy


def divergences(of_base: Scored, of_policy: Scored, counts: Counts) -> dict[str, Any]:
    """KL and total variation before and after, and what a draw of either model is worth as a candidate."""
    both = Scored(*(torch.cat([a[:, 1:], b[:, 1:]], dim=1) for a, b in zip(of_base, of_policy, strict=True)))
    n, m = of_base.energy.shape[1] - 1, of_policy.energy.shape[1] - 1
    shares = math.log(n / (n + m)), math.log(m / (n + m))
    log_mixture = torch.logaddexp(both.log_base + shares[0], both.log_pi + shares[1])
    before, after = (distances(log_m, both.log_score, log_mixture) for log_m in (both.log_base, both.log_pi))
    of = {
        "base": log_partition(-of_base.energy[:, 1:]),
        "distilled": log_partition((of_policy.log_score - of_policy.log_pi)[:, 1:]),
        "both": log_partition(both.log_score - log_mixture),
    }
    told: dict[str, Any] = {
        name: {
            "before": _mean(getattr(before, name), counts),
            "after": _mean(getattr(after, name), counts),
            "less": _mean(getattr(before, name) - getattr(after, name), counts),
        }
        for name in Distances._fields
    }
    worth = (of["distilled"].ess.mean() / m) / (of["base"].ess.mean() / n)
    return told | {
        "windows": len(counts),
        "documents": counts.num_documents,
        "draws": {name: _diagnostics(found, counts) for name, found in of.items()},
        "candidates_worth": worth.item(),  # draws of the base that one of the policy stands for
        "verdict": of["both"].verdict(),
    }


def _diagnostics(found: LogPartition, counts: Counts) -> dict[str, Any]:
    """Of the weights for the joint model: the larger the effective sample size, the fewer candidates are needed."""
    k_hat = found.k_hat[found.k_hat > -math.inf]
    return {
        "draws": found.n,
        "ess": _mean(found.ess, counts),
        "largest_share": _mean(found.largest_share, counts),
        "log_partition": _mean(found.lower, counts),
        "k_hat": k_hat.mean().item() if len(k_hat) and k_hat.isfinite().all() else None,
    }


def _mean(values: Float[Tensor, " W"], counts: Counts) -> dict[str, Any]:
    """The mean over windows, with its interval over documents."""
    return as_json(measured_rate(counts.by_document(values.numpy()), counts.by_document(np.ones(len(counts)))))


def as_json(found: Measurement) -> dict[str, Any]:
    """Value and interval."""
    return {"value": found.value, "interval": found.interval}
