"""Draw tokens from logits, with both log-probabilities, in few passes over the vocabulary.

    x = min { v : q_1 + … + q_v > u · Σ q },      log P(x) = log p_x − log Σ p,      log q(x) = log q_x − log Σ q

where p = exp(logits) up to a factor and q is its truncation. Nothing is normalised, sorted or summed up cumulatively
over the whole vocabulary: the same u gives the same token as ``rng.choose``, and a truncation looks only at its top
tokens. They are found in two levels too: the k largest numbers are in the k blocks with the largest maxima.

Legend: R rows, V tokens, W = V filled up to whole blocks (``room_for``), M tokens that may be drawn.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import BLOCK, Rows, invert
from freenergy.core.truncation import Truncation, normalised

NOTHING = -1e30  # the logit of no token: finite, since 0 · −inf is NaN
_FINE = 32  # tokens in a block of the search for the top
_NUCLEUS = 256  # how far down a nucleus is looked for before everything is sorted

Picked = tuple[Int[Tensor, " R"], Float[Tensor, " R"]]  # the index that is drawn in each row, and Σ of the weights


class DrawnTokens(NamedTuple):
    """A token for each row, and float64 numbers: log-probabilities, and what a trace records where it was asked for."""

    tokens: Int[Tensor, " R"]
    log_base: Float[Tensor, " R"]
    log_proposal: Float[Tensor, " R"]
    entropy: Float[Tensor, " R"] | None = None
    log_rank: Float[Tensor, " R"] | None = None  # 0 is the likeliest token


def room_for(rows: int, V: int, like: Tensor) -> Float[Tensor, "R W"]:
    """Allocate logits in whole blocks; entries that are not a token are NOTHING."""
    return like.new_empty(rows, -(-V // BLOCK) * BLOCK)


def draw(
    logits: Float[Tensor, "R W"], truncation: Truncation, pick: Callable[[Tensor], Picked], is_traced: bool
) -> DrawnTokens:
    """Draw one token per row; the logits may be overwritten."""
    if truncation.is_identity and not is_traced:
        p = torch.softmax(logits, -1, out=logits)  # the fastest way to exp; what its sums have lost cancels
        tokens, total = pick(p)
        log_p = (_at(p, tokens).double() / total).log()
        return DrawnTokens(tokens, log_p, log_p)
    below = logits - logits.amax(-1, keepdim=True)
    p = below.exp()
    total = _total(p)
    weights, kept = _proposal(below, p, total, truncation)
    index, weight = pick(weights)
    tokens = index if kept is None else _at(kept, index)
    log_proposal = (_at(weights, index).double() / weight).log()
    drawn = DrawnTokens(tokens, _at(below, tokens).double() - total.log(), log_proposal)
    return drawn if not is_traced else drawn._replace(**_seen(below, p, total, tokens))


def _seen(below: Tensor, p: Tensor, total: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Return what a trace records of the predictions."""
    mean = torch.linalg.vecdot(p, below.clamp(min=NOTHING)).double() / total
    rank = 1 + (below > _at(below, tokens).unsqueeze(-1)).sum(-1)
    return {"entropy": total.log() - mean, "log_rank": rank.double().log()}


def _proposal(below: Tensor, p: Tensor, total: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor | None]:
    """Return weights of q, and the tokens that they belong to in the order of the vocabulary (None: all of them)."""
    W, k = below.shape[-1], truncation.top_k
    has_nucleus = truncation.top_p is not None and truncation.top_p < 1
    if truncation.is_identity:
        return p, None
    if (k is None or k >= W) and not has_nucleus:
        return _heated(below, truncation), None
    values, tokens = top(below, min(W, k or _NUCLEUS))
    weights = _heated(values, truncation)
    if truncation.top_p is not None and has_nucleus:
        if k is None and truncation.temperature != 1:
            total = _total(_heated(below, truncation))
        whole = total if k is None else weights.sum(-1, dtype=torch.float64)
        before = (weights.cumsum(-1) - weights) / whole.unsqueeze(-1)
        if k is None and bool((before[:, -1] < truncation.top_p).any()):
            return truncation(normalised(below)).exp(), None  # a wide nucleus: everything is sorted
        weights = weights.masked_fill(before >= truncation.top_p, 0)
    order = tokens.argsort(-1)
    return weights.gather(-1, order), tokens.gather(-1, order)


def _heated(below: Tensor, truncation: Truncation) -> Tensor:
    """Compute p^(1/temperature); a temperature that rounds to 0 leaves the likeliest token and not 0/0."""
    return torch.where(below == 0, below, below / truncation.temperature).exp_()


def top(logits: Float[Tensor, "R W"], k: int) -> tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]:
    """Return the k largest and their places, in order; the k blocks with the largest maxima hold them all."""
    R, W = logits.shape
    blocks = logits.view(R, W // _FINE, _FINE)
    if k >= W // _FINE:
        values, place = logits.topk(k, dim=-1)
        return values, place
    best = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
    inside = blocks.gather(1, best.unsqueeze(-1).expand(R, k, _FINE)).flatten(1)
    values, place = inside.topk(k, dim=-1)
    return values, best.gather(1, place // _FINE) * _FINE + place % _FINE


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _mass(weights: Float[Tensor, "R W"]) -> Float[Tensor, "R blocks"]:
    """Sum over blocks; they are short enough to be added up in the precision of the weights."""
    mass: Tensor = weights.unflatten(-1, (-1, BLOCK)).sum(-1).double()
    return mass


def _total(weights: Float[Tensor, "R W"]) -> Float[Tensor, " R"]:
    return _mass(weights).sum(-1)


def by_rows(rows: Rows, shape: tuple[int, int], weights: Float[Tensor, "R M"]) -> Picked:
    """Pick through the door that every kind of ``Rows`` has, for all B × N candidates at once."""
    chosen = rows.categorical(weights.log().unflatten(0, shape)).flatten()
    return chosen, weights.sum(-1, dtype=torch.float64)


def by_uniform(u: Float[Tensor, " R"], weights: Float[Tensor, "R M"]) -> Picked:
    """Pick by inverting the cumulative sum at u: first the block, then the token inside it."""
    if weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % BLOCK))
    return invert(weights.unflatten(-1, (-1, BLOCK)), _mass(weights), u)
