"""What a server's list of likeliest tokens says about the proposal q.

    log q(x) = log P(x) / T − log Σ_{v kept} P(v)^{1/T}

The kept tokens are the k likeliest, or the nucleus, so a list that holds them all gives q exactly. What a list cannot
give is refused: temperature alone needs the whole vocabulary, and temperature with a nucleus depends on which of the
two a server applies first.
"""

import math
from collections.abc import Mapping

import torch

from freenergy.core.errors import UserError
from freenergy.core.truncation import Truncation

ROUNDING = 1e-5  # of a server's sums in float32


def check_knowable(truncation: Truncation, *, vocab_size: int, most_log_probs: int) -> None:
    """Refuse a truncation whose probabilities no list of ``most_log_probs`` tokens can give."""
    tempered = truncation.temperature != 1
    if tempered and truncation.top_p not in (None, 1.0):
        raise UserError(
            f"temperature {truncation.temperature} with top_p {truncation.top_p} cannot be drawn from a server with "
            "exact probabilities, because servers apply them in different orders: leave one of them out"
        )
    if tempered and truncation.top_k is None and most_log_probs < vocab_size:
        raise UserError(
            f"temperature {truncation.temperature} alone needs the log-probabilities of all {vocab_size} tokens at "
            f"each step and the server gives {most_log_probs}: set top_k as well"
        )


def list_size(truncation: Truncation, *, vocab_size: int, most_log_probs: int) -> int:
    """Return how many of the likeliest tokens are asked for, to know q."""
    if truncation.is_identity:
        return 1
    return min(truncation.top_k or most_log_probs, vocab_size)


def log_proposal(top: Mapping[int, float], drawn: float, truncation: Truncation, size: int, server: str) -> float:
    """Compute log q of a token with log-probability ``drawn``, from the ``size`` likeliest tokens."""
    ranked = sorted(top.values(), reverse=True)[:size]  # a server may add the drawn token to its list
    if len(ranked) < size:
        raise UserError(
            f"{size} log-probabilities per token were requested and the server at {server} gave {len(ranked)}: start "
            f"it so that it gives more (vLLM: --max-logprobs {size}), or lower top_k"
        )
    num = _num_kept(ranked, drawn, truncation, server)
    log_q = torch.tensor([drawn, *ranked[:num]], dtype=torch.float64) / truncation.temperature
    return float(log_q[0] - log_q[1:].logsumexp(0))


def tail(top: Mapping[int, float], size: int) -> float:
    """Return the probability outside the ``size`` likeliest tokens."""
    return 1 - math.fsum(math.exp(value) for value in sorted(top.values(), reverse=True)[:size])


def _num_kept(ranked: list[float], drawn: float, truncation: Truncation, server: str) -> int:
    """Return how many of the likeliest tokens the truncation keeps; the drawn one must be among them."""
    rank = sum(value > drawn + ROUNDING for value in ranked)
    num, top_p = len(ranked), truncation.top_p or 1.0
    if top_p < 1:
        p = torch.tensor(ranked, dtype=torch.float64).exp()
        share = p / p.sum() if truncation.top_k is not None else p  # the nucleus of the k likeliest, or of all
        before = share.cumsum(0) - share
        if truncation.top_k is None and float(share.sum()) < top_p:
            raise UserError(
                f"the {num} likeliest tokens hold {float(share.sum()):.3f} of the probability, less than top_p = "
                f"{top_p}: raise most_log_probs (and vLLM's --max-logprobs), lower top_p, or set top_k"
            )
        num = int((before < top_p).sum())
        if num <= rank < len(ranked) and float(before[rank]) < top_p + ROUNDING:
            num = rank + 1  # the server's sum fell on the other side of top_p by rounding
    if rank >= num:
        raise UserError(
            f"the server at {server} drew a token that {truncation} leaves out: it ignores top_k or top_p, or its "
            "log-probabilities are not of the raw logits (vLLM: --logprobs-mode raw_logprobs)"
        )
    return num
