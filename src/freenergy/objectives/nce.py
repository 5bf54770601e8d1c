"""Noise-contrastive estimation: tell data from noise.

    s = log_score − log_noise,      s⁺ of data, s⁻ of K negatives of each datum

Binary: classify data against noise.

    loss = − mean log σ(s⁺ − log ν) − ν · mean log σ(log ν − s⁻)

ν is the ratio of noise to data. The minimum over all functions is at log_score = log P_data, so the model learns to be
normalised by itself. ν = 1 is Eq. 3 of Deng et al. (2020); ν = K, the number of negatives per datum, is the conditional
noise-contrastive estimation of section 4.1.3 of Ou (2024).

Ranking: which of K + 1 is the datum?

    loss = − mean_b [ s⁺_b − log(e^{s⁺_b} + Σ_i e^{s⁻_bi}) ]

A number added to all scores of a context changes nothing, so Z(c) need not be learned: the minimum over all functions
is at log_score = log P_data + any function of c. log(K + 1) − loss is the certified gain with n = K + 1 candidates, so
a held-out loss reads directly as nats (``freenergy.partition.certificate``).

Both report the same metrics. ``accuracy`` is the share of correct decisions, a tie counting one half, so that a model
that knows nothing has 0.5; ``energy_data`` and ``energy_noise`` are means of −log_score; ``certified_gain`` is the gain
over the law of the negatives, with n = K + 1 candidates, in nats per sequence.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.roles import Loss, Scores


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryNCE:
    """Logistic regression of data against noise.

    ``kind = "conditional"`` is an alias for the noise ratio K of each batch, whatever K is.
    """

    kind: Literal["binary", "conditional"] = "binary"
    noise_ratio: float = 1.0  # ν

    def __post_init__(self) -> None:
        check_range(self, "noise_ratio", above=0, hint=" (1 weighs data and noise alike)")
        if self.kind == "conditional" and self.noise_ratio != 1:
            raise UserError(
                f'noise_ratio is {self.noise_ratio}, but kind = "conditional" sets it to the number of negatives: '
                'leave noise_ratio out, or set kind = "binary"'
            )

    def __call__(self, data: Scores, negatives: Scores) -> Loss:
        """Returns the loss of data [B, 1] against negatives [B, K]."""
        positive, negative = data.logit, negatives.logit
        nu = self.noise_ratio if self.kind == "binary" else float(negative.shape[1])
        log_nu = math.log(nu)
        value = -logsigmoid(positive - log_nu).mean() - nu * logsigmoid(log_nu - negative).mean()
        right_data, right_noise = share_above(positive, log_nu), 1 - share_above(negative, log_nu)
        return Loss(value, metrics(data, negatives, right_data, right_noise))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankingNCE:
    """Softmax over one datum and its negatives. Both accuracies are the share of pairs whose datum scores higher."""

    kind: Literal["ranking"] = "ranking"

    def __call__(self, data: Scores, negatives: Scores) -> Loss:
        """Returns the loss of data [B, 1] against negatives [B, K]."""
        positive, negative = data.logit, negatives.logit
        value = torch.cat([positive, negative], dim=1).logsumexp(1).mean() - positive.mean()
        right = share_above(positive.expand_as(negative), negative)
        return Loss(value, metrics(data, negatives, right, right))


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
