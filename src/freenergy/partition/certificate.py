"""The gain that importance resampling with n candidates is certain to have.

    gain(x) = −E(x) − log[(e^{−E(x)} + Σ_{i<n} e^{−E(x_i)}) / n],        x_i ~ P_LM(· | c)

Resampling draws n candidates from P_LM and emits one of them with probability proportional to e^{−E}. At every n,
log P_LM(x) + gain(x) is in expectation over the x_i a lower bound on the log-probability that it emits x, so the mean
gain on held-out text, in nats per sequence, is really there. It is at most log n, and at n = 1 it is 0. It equals
log n minus the ranking loss with n − 1 negatives. Where draws come from another law q, put log q − log P_LM + E for E:
the gain is then over q.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def certified_gain(
    data: Float[Tensor, "B 1"] | Float[Tensor, " B"], draws: Float[Tensor, "B n_minus_1"]
) -> Float[Tensor, " B"]:
    """Return nats per sequence, from the energies of a text and of n − 1 draws for the same context; float64.

    >>> certified_gain(torch.tensor([-100.0]), torch.tensor([[0.0, 0.0, 0.0]])).exp()  # at most n
    tensor([4.], dtype=torch.float64)
    """
    log_weight = -torch.cat([data.reshape(-1, 1), draws], dim=1).double()
    return log_weight[:, 0] - log_weight.logsumexp(1) + math.log(log_weight.shape[1])
