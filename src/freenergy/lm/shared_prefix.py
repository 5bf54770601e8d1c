"""Attention that we decide: one copy of the prefix for N continuations, and rows that see both ways.

    softmax([q·K_p, q·K_x]) · [V_p; V_x]  =  w · softmax(q·K_p)·V_p  +  (1 − w) · softmax(q·K_x)·V_x,
    w = sigmoid(logsumexp(q·K_p) − logsumexp(q·K_x))

The prefix part [B] is never expanded to the B × N rows of the continuations. The rows are causal, or they see every
real token of their own in both directions; then the prefix, too, may be read in both directions, and what its layers
computed is recorded for the continuations. Any model that fetches its attention from transformers'
``AttentionInterface`` can use it.

Legend: B contexts, N continuations of each, R = B·N rows, H heads in K groups of G (grouped-query), P prefix tokens,
S new tokens, T continuation tokens so far, D head width.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

NAME = "freenergy_shared_prefix"
_HANDLED = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "is_causal",
    "deterministic",
}  # fmt: skip


class Prefix(NamedTuple):
    """What a model remembers of B contexts: keys and values of every layer, once."""

    keys: list[Float[Tensor, "B K P D"]]
    values: list[Float[Tensor, "B K P D"]]
    lengths: Int[Tensor, " B"]

    @classmethod
    def from_cache(cls, cache: "DynamicCache", lengths: Int[Tensor, " B"]) -> "Prefix":
        """Take over what a stock forward pass has left in its cache."""
        layers: list[Any] = cache.layers
        return cls([layer.keys for layer in layers], [layer.values for layer in layers], lengths)


@final
@dataclass(frozen=True, slots=True)
class _Reading:
    """Which attention is active: what stands before the rows, and what a row sees of itself."""

    prefix: Prefix | None = None
    lengths: Int[Tensor, " R"] | None = None  # of rows that see both ways; None is causal
    memory: Prefix | None = None  # takes up the keys and values of this reading
    calls: Iterator[int] = field(default_factory=count)  # layers by the order of their calls: encoders number none


class _Terms(NamedTuple):
    """What a layer asks of its attention besides a product of queries and keys."""

    window: int | None
    softcap: float | None
    dropout: float


_PLAIN = _Terms(None, None, 0.0)
_ACTIVE: ContextVar[_Reading | None] = ContextVar("freenergy_reading", default=None)


@contextmanager
def _active(model: "PreTrainedModel", reading: _Reading) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    stock = model.config._attn_implementation
    token = _ACTIVE.set(reading)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(stock)
        _ACTIVE.reset(token)


def attending_to(prefix: Prefix, model: "PreTrainedModel") -> AbstractContextManager[None]:
    """Within this block one call of the model reads ``prefix`` before its causal rows."""
    return _active(model, _Reading(prefix))


def seeing_both_ways(
    model: "PreTrainedModel", lengths: Int[Tensor, " R"], *, after: Prefix | None = None
) -> AbstractContextManager[None]:
    """Within this block one call of the model sees every real token of a row from every other.

    ``lengths`` are those of the rows, padding is masked; the rows also see all of the prefix that they come ``after``.
    """
    return _active(model, _Reading(after, lengths))


@contextmanager
def remembering(model: "PreTrainedModel", lengths: Int[Tensor, " R"]) -> Iterator[Prefix]:
    """Within this block one call of the model sees both ways, and what its layers compute becomes a ``Prefix``."""
    memory = Prefix([], [], lengths)
    with _active(model, _Reading(None, lengths, memory)):
        yield memory


def _attention(
    module: torch.nn.Module,
    query: Float[Tensor, "R H S D"],
    key: Float[Tensor, "R K T D"],
    value: Float[Tensor, "R K T D"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, called by transformers: each query sees its prefix and what it may of its own row."""
    strange = {name for name, value in kwargs.items() if value is not None} - _HANDLED
    if attention_mask is not None or strange:
        raise NotImplementedError(f"attention with {sorted(strange) or 'a mask'}")
    reading = _ACTIVE.get()
    assert reading is not None, "this attention runs inside attending_to, seeing_both_ways or remembering"
    layer, terms = next(reading.calls), _Terms(sliding_window, softcap, dropout)
    if reading.memory is not None:
        reading.memory.keys.append(key)
        reading.memory.values.append(value)
    (R, H, S, D), K, T, prefix = query.shape, key.shape[1], key.shape[2], reading.prefix
    if prefix is None and reading.lengths is not None and terms == _PLAIN:  # one part: torch's own attention is faster
        seen = None if _all_are(reading.lengths, T) else (torch.arange(T).to(key.device) < reading.lengths.view(R, 1))
        mask = None if seen is None else seen.view(R, 1, 1, T).expand(R, 1, S, T)
        whole = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=H != K)
        return whole.transpose(1, 2), None
    B = R if prefix is None else len(prefix.lengths)
    q = query.reshape(B, R // B, K, H // K, S, D) * (scaling if scaling is not None else D**-0.5)
    step = torch.arange(T - S, T, device=query.device)  # place of each new token in its row
    out, mass_x = _over_row(q, key, value, reading.lengths, step, terms)
    if prefix is not None:
        out_p, mass_p = _over_prefix(q, prefix.keys[layer], prefix.values[layer], prefix.lengths, step, terms)
        out = torch.lerp(out, out_p, torch.sigmoid(mass_p - mass_x).to(out))
    return out.reshape(R, H, S, -1).transpose(1, 2), None


def _over_prefix(
    q: Float[Tensor, "B N K G S D"],
    k: Float[Tensor, "B K P D"],
    v: Float[Tensor, "B K P D"],
    lengths: Int[Tensor, " B"],
    step: Int[Tensor, " S"],
    terms: _Terms,
) -> tuple[Tensor, Tensor]:
    """Attend from all N·G·S queries of a context to one copy of its keys."""
    (B, N, K, G, S, D), P = q.shape, k.shape[2]
    ahead = torch.arange(P, device=q.device) - lengths.view(B, 1)  # −1 is the last token of the context
    hidden = None
    if terms.window is not None or not _all_are(lengths, P):
        hidden = (ahead >= 0).view(B, 1, P).expand(B, S, P)
        if terms.window is not None:
            hidden = hidden | (step.view(1, S, 1) - ahead.view(B, 1, P) >= terms.window)
        hidden = hidden.view(B, 1, 1, S, P).expand(B, 1, N * G, S, P).reshape(B, 1, N * G * S, P)
    out, mass = _part(q.transpose(1, 2).reshape(B, K, N * G * S, D), k, v, hidden, terms)
    return out.view(B, K, N, G, S, -1).transpose(1, 2), mass.reshape(B, K, N, G, S, 1).transpose(1, 2)


def _over_row(
    q: Float[Tensor, "B N K G S D"],
    k: Float[Tensor, "R K T D"],
    v: Float[Tensor, "R K T D"],
    lengths: Int[Tensor, " R"] | None,
    step: Int[Tensor, " S"],
    terms: _Terms,
) -> tuple[Tensor, Tensor]:
    """Attend from every row to its own keys: its past, or all its tokens; a window is as wide to both sides."""
    (B, N, K, G, S, D), T = q.shape, k.shape[2]
    place = torch.arange(T, device=q.device)
    back = step.view(S, 1) - place
    hidden: Tensor | None = None
    if lengths is None:
        hidden = ((back < 0) | (back >= (terms.window or T + 1))).repeat(G, 1)
    elif terms.window is not None or not _all_are(lengths, T):
        far = (back.abs() >= (terms.window or T + 1)).repeat(G, 1)
        hidden = far | (place >= lengths.view(-1, 1)).view(-1, 1, 1, T)
    out, mass = _part(q.reshape(B * N, K, G * S, D), k, v, hidden, terms)
    return out.view(B, N, K, G, S, -1), mass.reshape(B, N, K, G, S, 1)


def _all_are(lengths: Int[Tensor, " rows"], width: int) -> bool:
    """Return whether nothing is padded; only a CPU is asked, since another device would have to be waited for."""
    return lengths.device.type == "cpu" and bool((lengths == width).all())


def _part(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Attend over one part; return also the log of its share of the softmax's denominator."""
    asks = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if hidden is None and not asks and terms == _PLAIN and q.device.type == "cpu" and k.shape[2]:
        out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
        return out, mass.unsqueeze(-1)
    scores = q @ k.transpose(-1, -2)
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if hidden is not None:  # finite: a part with nothing to see has weight 0
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    mass = scores.logsumexp(-1, keepdim=True)
    weights = (scores - mass).exp()
    if terms.dropout:  # the parts' weights are those of the whole up to a factor, so this is dropout on the whole
        weights = torch.nn.functional.dropout(weights, terms.dropout)
    return weights @ v, mass
