"""Binary noise-contrastive estimation: tell the datum from the noise.

    loss = − mean log σ(s⁺ − log ν) − ν · mean log σ(log ν − s⁻),        s = log P_LM − E − log noise

ν is how many times as much noise as data there is; ν = 1 is Eq. 3 of Deng et al. (2020). The minimum over all functions
is at E = log P_LM − log P_data: the model learns to be normalised by itself.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from torch.nn.functional import logsigmoid

from freenergy.core.errors import UserError
from freenergy.core.roles import Loss, Scores
from freenergy.objectives.metrics import metrics, share_above


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryNCE:
    """Logistic regression of data against noise."""

    kind: Literal["binary"] = "binary"
    noise_ratio: float = 1.0  # ν

    def __post_init__(self) -> None:
        if not 0 < self.noise_ratio < math.inf:
            raise UserError(f"noise_ratio is {self.noise_ratio}: set it above 0 (1 weighs data and noise alike)")

    def __call__(self, data: Scores, negatives: Scores) -> Loss:
        """Data [B, 1] against negatives [B, K]."""
        nu, log_nu = self.noise_ratio, math.log(self.noise_ratio)
        positive, negative = data.logit, negatives.logit
        value = -logsigmoid(positive - log_nu).mean() - nu * logsigmoid(log_nu - negative).mean()
        right_data, right_noise = share_above(positive, log_nu), 1 - share_above(negative, log_nu)
        return Loss(value, metrics(data, negatives, right_data, right_noise))
