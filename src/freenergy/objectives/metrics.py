"""Metrics that are reported with a loss, the same for every objective.

    accuracy = share of correct decisions, a tie counting one half, so that a model that knows nothing has 0.5

``energy_data`` and ``energy_noise`` are means of −log_score. ``certified_gain`` is the gain over the law of the
negatives, with n = K + 1 candidates, in nats per sequence.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import Scores


def share_above(values: Float[Tensor, "*shape"], threshold: Float[Tensor, "*other"] | float) -> float:
    """Share of values above a threshold; a tie is one half."""
    return ((values > threshold).double() + (values == threshold).double() / 2).mean().item()


@torch.no_grad()
def metrics(data: Scores, negatives: Scores, accuracy_data: float, accuracy_noise: float) -> dict[str, float]:
    """The metrics of one batch."""
    energies = -torch.cat([data.log_score, negatives.log_score], dim=1).double()
    logits = torch.cat([data.logit, negatives.logit], dim=1)
    gain = logits[:, 0] - logits.logsumexp(1) + math.log(logits.shape[1])  # ``partition.certificate``, of these n
    return {
        "accuracy_data": accuracy_data,
        "accuracy_noise": accuracy_noise,
        "energy_data": energies[:, :1].mean().item(),
        "energy_noise": energies[:, 1:].mean().item(),
        "spread": energies.std(correction=0).item(),
        "certified_gain": gain.mean().item(),
    }
