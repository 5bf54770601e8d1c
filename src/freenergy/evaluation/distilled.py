"""How near a distilled policy π has come to the residual model P, and what its draws are worth as candidates.

    n draws of P_LM and m of π are draws of the mixture  q = (n·P_LM + m·π)/(n + m),      w = P_LM · e^{−E} / q

On them KL and total variation of both models are reported (``training.tasks.distil.distances``): so the difference
between the two is a paired one, and neither is judged by its own draws alone.

As candidates for resampling from P, draws of the base weigh e^{−E} and draws of π weigh P_LM · e^{−E} / π. Both are
reported with the same number k of draws: the effective sample size, the mean log Ẑ, which is below log Z and rises
towards it as candidates get better or more, and the certified perplexity of resampling from k + 1 candidates.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.evaluation.perplexity import Counts, Measurement
from freenergy.partition import certified_gain, log_partition
from freenergy.training.tasks.distil import Distances, distances


class PolicyScores(NamedTuple):
    """W windows with m strings each, the true one first, under both models."""

    log_base: Float[Tensor, "W m"]
    log_pi: Float[Tensor, "W m"]
    energy: Float[Tensor, "W m"]

    @property
    def log_score(self) -> Float[Tensor, "W m"]:
        """log P_LM − E."""
        return self.log_base - self.energy


def divergences(of_base: PolicyScores, of_policy: PolicyScores, counts: Counts) -> dict[str, Any]:
    """KL and total variation to P, of the base and of the policy, from the draws of both."""
    both = PolicyScores(*(torch.cat([a[:, 1:], b[:, 1:]], dim=1) for a, b in zip(of_base, of_policy, strict=True)))
    n, m = of_base.energy.shape[1] - 1, of_policy.energy.shape[1] - 1
    of_mixture = torch.logaddexp(both.log_base + math.log(n / (n + m)), both.log_pi + math.log(m / (n + m)))
    before, after = (distances(log_m, both.log_score, of_mixture) for log_m in (both.log_base, both.log_pi))
    Z = log_partition(both.log_score - of_mixture)
    numbers: dict[str, Any] = {
        name: {
            "before": _mean(getattr(before, name), counts),
            "after": _mean(getattr(after, name), counts),
            "less": _mean(getattr(before, name) - getattr(after, name), counts),
        }
        for name in Distances._fields
    }
    numbers["windows"], numbers["documents"] = len(counts), counts.num_documents
    return numbers | {"draws": n + m, "ess": _mean(Z.ess, counts), "verdict": Z.verdict()}


def as_candidates(of_base: PolicyScores, of_policy: PolicyScores, counts: Counts) -> dict[str, Any]:
    """What as many draws of either model do for resampling from P."""
    k = min(of_base.energy.shape[1], of_policy.energy.shape[1]) - 1
    laws = {"base": (of_base, of_base.log_base), "distilled": (of_policy, of_policy.log_pi)}
    numbers: dict[str, Any] = {"draws": k}
    for name, (scored, log_q) in laws.items():
        log_weight = (scored.log_score - log_q)[:, : k + 1]
        Z, gain = log_partition(log_weight[:, 1:]), certified_gain(-log_weight[:, 0], -log_weight[:, 1:])
        numbers[name] = {
            "ess": _mean(Z.ess, counts),
            "largest_share": _mean(Z.largest_share, counts),
            "log_partition": _mean(Z.lower, counts),
            "certified_perplexity": as_json(counts.perplexity((log_q[:, 0] + gain).numpy())),
        }
    return numbers


def _mean(values: Float[Tensor, " W"], counts: Counts) -> dict[str, Any]:
    return as_json(counts.mean(values.numpy()))


def as_json(found: Measurement) -> dict[str, Any]:
    """Value and interval."""
    return {"value": found.value, "interval": found.interval}
