"""Conditional noise-contrastive estimation: each datum against the K negatives of its own context.

    loss = − mean_b [ log σ(s⁺_b − log K) + Σ_i log σ(log K − s⁻_bi) ],        s = log P_LM − E − log noise

Section 4.1.3 of Ou (2024) with ν = K. As there, it is consistent where E is powerful enough to take in Z(c) of every
context: the minimum over all functions is at E = log P_LM − log P_data.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from torch.nn.functional import logsigmoid

from freenergy.core.roles import Loss, Scores
from freenergy.objectives.metrics import metrics, share_above


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalNCE:
    """Logistic regression with as much noise as there are negatives."""

    kind: Literal["conditional"] = "conditional"

    def __call__(self, data: Scores, negatives: Scores) -> Loss:
        """Data [B, 1] against negatives [B, K]."""
        positive, negative = data.logit, negatives.logit
        log_k = math.log(negative.shape[1])
        terms = logsigmoid(positive - log_k).sum(1) + logsigmoid(log_k - negative).sum(1)
        right_data, right_noise = share_above(positive, log_k), 1 - share_above(negative, log_k)
        return Loss(-terms.mean(), metrics(data, negatives, right_data, right_noise))
