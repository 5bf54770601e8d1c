"""How a proposal is made from a language model, token by token.

q(v) ∝ p(v)^(1/temperature) on the kept tokens: temper, keep the top k, keep the nucleus, renormalise
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """How a proposal q is made from P_LM at each step: temper, then keep the top k, then the nucleus; renormalise.

    q(v) ∝ p(v)^(1/temperature) on the kept tokens. The default keeps everything: q = P_LM (ancestral sampling).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0, hint=" (for the single likeliest token, top_k = 1)")
        check_range(self, "top_k", at_least=1, hint=", or leave it out to keep every token")
        check_range(self, "top_p", above=0, at_most=1, hint=", or leave it out")

    @property
    def is_identity(self) -> bool:
        """True when q = P_LM."""
        return self.temperature == 1 and self.top_k is None and self.top_p in (None, 1.0)

    def __call__(self, log_probs: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """log q from log P_LM, both normalised over the vocabulary; −inf at dropped tokens."""
        if self.is_identity:
            return log_probs
        # from the top down, so that a temperature that rounds to 0 leaves the likeliest token and not 0/0
        below = log_probs - log_probs.amax(-1, keepdim=True)
        log_q = torch.where(below == 0, below, below / self.temperature)
        if self.top_k is not None and self.top_k < log_q.shape[-1]:
            # by index, not by value: exactly k tokens survive even when the k-th is tied
            keep = log_q.topk(self.top_k, dim=-1).indices
            log_q = torch.full_like(log_q, -torch.inf).scatter(-1, keep, log_q.gather(-1, keep))
        if self.top_p is not None and self.top_p < 1:
            ranked, order = normalised(log_q).sort(dim=-1, descending=True, stable=True)
            mass_before = ranked.exp().cumsum(-1) - ranked.exp()
            late = mass_before >= self.top_p  # the nucleus is full before these
            log_q = log_q.masked_fill(late.scatter(-1, order, late), -torch.inf)
        return normalised(log_q)


ANCESTRAL = Truncation()


def normalised(log_weights: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """log w − log Σ w, where torch's log_softmax would be the obvious call.

    On a CPU that one adds the vocabulary up in float32 one by one: a bias of 7e-6 a token at 49,152 tokens, 3e-4 in a
    sequence of forty. logsumexp adds in pairs.
    """
    return log_weights - log_weights.logsumexp(-1, keepdim=True)
