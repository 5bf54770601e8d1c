"""What a person wants to know beside a loss, alike for every objective.

    accuracy = share of verdicts that are right, a tie counting one half: so a model that knows nothing has 0.5

``certified_gain`` is over the law of the negatives, with n = K + 1 candidates, in nats a sequence.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import Scores
from freenergy.partition.certificate import certified_gain


def share_above(values: Float[Tensor, "*shape"], threshold: Float[Tensor, "*other"] | float) -> float:
    """Share of values above a threshold; a tie is one half."""
    return ((values > threshold).double() + (values == threshold).double() / 2).mean().item()


@torch.no_grad()
def metrics(data: Scores, negatives: Scores, accuracy_data: float, accuracy_noise: float) -> dict[str, float]:
    """The metrics of one batch."""
    energies = torch.cat([data.energy, negatives.energy], dim=1).double()
    return {
        "accuracy_data": accuracy_data,
        "accuracy_noise": accuracy_noise,
        "energy_data": data.energy.double().mean().item(),
        "energy_noise": negatives.energy.double().mean().item(),
        "spread": energies.std(correction=0).item(),
        "certified_gain": certified_gain(-data.logit, -negatives.logit).mean().item(),
    }
