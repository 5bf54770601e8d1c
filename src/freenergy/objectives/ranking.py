"""Ranking noise-contrastive estimation: which of K + 1 is the datum?

    loss = − mean_b [ s⁺_b − log(e^{s⁺_b} + Σ_i e^{s⁻_bi}) ],        s = log_score − log_noise

A number added to all scores of a context changes nothing, so Z(c) need not be learned: the minimum over all functions
is at log_score = log P_data + any function of c. log(K + 1) − loss is the certified gain with n = K + 1 candidates, so
a held-out loss reads directly as nats (``freenergy.partition.certificate``).
"""

from dataclasses import dataclass
from typing import Literal, final

import torch

from freenergy.core.roles import Loss, Scores
from freenergy.objectives.metrics import metrics, share_above


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
