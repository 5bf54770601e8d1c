"""Accept or reject, written once.

accepted ~ Bernoulli(min(1, e^{log_ratio}))        one coin per chain or proposal, from its own stream
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations


def acceptance(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """min(1, e^{log_ratio}).

    >>> acceptance(torch.tensor([0.0, 5.0, -torch.inf])).tolist()
    [1.0, 1.0, 0.0]
    """
    return log_ratio.clamp(max=0).exp()


def move(is_accepted: Bool[Tensor, " chains"], new: Continuations, old: Continuations) -> Continuations:
    """Return the new position of every chain that accepts, and the old one of the others."""
    K = len(is_accepted)
    return Continuations.cat([old, new], dim=1).candidates(torch.arange(K) + K * is_accepted)


def accept_at(probability: Float[Tensor, " n"], u: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Return u < probability: the coin of a kernel that has drawn its uniform numbers already."""
    return u < probability


def accept(probability: Float[Tensor, " n"], rng: Rng) -> Bool[Tensor, " n"]:
    """Flip one coin per entry; entry i draws the same number whatever is in the batch (``rng.shift``)."""
    sides = torch.stack([torch.log1p(-probability), probability.log()], dim=-1)
    return rng.rows(1, len(probability), 1).categorical(sides.unsqueeze(0))[0].bool()
