"""Binary noise-contrastive estimation: classify data against noise.

    loss = − mean log σ(s⁺ − log ν) − ν · mean log σ(log ν − s⁻),        s = log_score − log_noise

ν is the ratio of noise to data. The minimum over all functions is at log_score = log P_data, so the model learns to be
normalised by itself. ν = 1 is Eq. 3 of Deng et al. (2020); ν = K, the number of negatives per datum, is the conditional
noise-contrastive estimation of section 4.1.3 of Ou (2024).
"""

import math
from dataclasses import dataclass
from typing import Literal, final

from torch.nn.functional import logsigmoid

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.roles import Loss, Scores
from freenergy.objectives.metrics import metrics, share_above


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
