"""A transformers model read: contexts once, what follows them, and the stepper that samples with it.

    log P(v | c, x_<t) = log softmax(logits)[v],      states: hidden states of chosen layers, 0 the embeddings

Legend: R rows, S tokens of each that were read, K layers chosen, H width of the states.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from freenergy.core.sequences import Continuations, Sequences
from freenergy.core.truncation import normalised
from freenergy.lm.activations import Recorder
from freenergy.lm.editing import Edit, applied, applied_after
from freenergy.lm.shared_prefix import Prefix, attending_to
from freenergy.lm.stepping import Next, exchanged, sum_tokens

TOLERANCE = 5e-4  # nats by which two ways of reading may differ on the telling example


class First(NamedTuple):
    """Contexts that have been read."""

    log_p: Float[Tensor, "B V"]  # of the first token that follows
    prefix: Prefix
    states: Float[Tensor, "B K H"]  # at the last token

    def some(self, contexts: slice) -> "First":
        """Return what was read of some contexts."""
        keys, values, lengths = self.prefix
        prefix = Prefix([key[contexts] for key in keys], [value[contexts] for value in values], lengths[contexts])
        return First(self.log_p[contexts], prefix, self.states[contexts])


@final
class _ContinuationLayer(CacheLayerMixin):
    """Keys and values of the continuations in one layer, in memory that is allocated once."""

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        R, K, _, _ = key_states.shape
        self.keys = key_states.new_empty(R, K, self.length, key_states.shape[-1])
        self.values = value_states.new_empty(R, K, self.length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.filled + key_states.shape[2]
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.length


@final
class SharedStepper:
    """Reads one token of each row at a time; the prefix stays in one copy."""

    def __init__(self, model: PreTrainedModel, first: First, num: int, length: int, layers: tuple[int, ...]) -> None:
        self.model, self.log_first, self.prefix, self.layers = model, first.log_p, first.prefix, layers
        self.states = first.states.unsqueeze(1)
        self.cache = Cache(layers=[_ContinuationLayer(length) for _ in first.prefix.keys])
        self.place = first.prefix.lengths.repeat_interleave(num).unsqueeze(1)

    def first(self) -> Float[Tensor, "B V"]:
        """Compute log P of the first token."""
        return self.log_first

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Read a token of each candidate."""
        read, show = tokens.reshape(-1, 1), {"output_hidden_states": bool(self.layers)}
        with attending_to(self.prefix, self.model):
            out = self.model(read, position_ids=self.place, past_key_values=self.cache, use_cache=True, **show)
        self.place = self.place + 1
        self.states = states_at(out, self.layers, read)[:, -1].unflatten(0, tokens.shape)
        return log_softmax(out.logits[:, -1]).view(*tokens.shape, -1)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Exchange the keys and values of the continuations; prefix and places are the same for all of them."""
        B, N = rows.shape
        flat = (rows + N * torch.arange(B, device=rows.device).unsqueeze(1)).flatten()
        self.cache.reorder_cache(flat)  # type: ignore[arg-type]
        self.states = exchanged(self.states, rows)


def read(model: PreTrainedModel, contexts: Sequences, layers: tuple[int, ...] = ()) -> First:
    """Read contexts once: log P of what comes next, and what the continuations need to remember."""
    cache = DynamicCache()  # without the config: a sliding window is the attention's business, nothing is forgotten
    log_first, states = predict_next(model, contexts, layers, past_key_values=cache, use_cache=True)
    return First(log_first, Prefix.from_cache(cache, contexts.lengths), states)


def predict_next(
    model: PreTrainedModel, contexts: Sequences, layers: tuple[int, ...] = (), *, use_cache: bool = False, **cache: Any
) -> Next:
    """Compute log P of the next token, and the states [B, K, H] that predict it."""
    last, show = contexts.lengths - 1, {"output_hidden_states": bool(layers)}
    out = model(contexts.tokens, use_cache=use_cache, logits_to_keep=last.unique(), **show, **cache)
    return log_softmax(at(out.logits, last)), states_at(out, layers, contexts.tokens)[row_numbers(last), last]


def later(model: PreTrainedModel, prefix: Prefix, x: Continuations, *, shows: bool = False) -> Any:
    """Return the model's output at all but the last token of continuations whose contexts have been read."""
    B, N, L = x.tokens.shape
    place = prefix.lengths.view(B, 1, 1) + torch.arange(L - 1, device=x.tokens.device)
    place, tokens = place.expand(B, N, L - 1).flatten(0, 1), x.tokens[:, :, :-1].flatten(0, 1)
    with attending_to(prefix, model):
        return model(tokens, position_ids=place, use_cache=False, output_hidden_states=shows)


def log_prob_whole(model: PreTrainedModel, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
    """Compute log P of whole strings by a stock forward pass, ``rows`` at once: the reference for other ways."""
    (B, N), P, device = x.shape, x.contexts.tokens.shape[1], x.tokens.device
    whole, starts = x.joined(), x.contexts.lengths.repeat_interleave(N)
    rows = max(1, rows * x.tokens.shape[2] // whole.tokens.shape[1])
    parts = []
    for r in range(0, B * N, rows):
        tokens = whole.tokens[r : r + rows]
        values = picked(model(tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])
        place = torch.arange(1, P + x.tokens.shape[2], device=device)
        is_continuation = (place >= starts[r : r + rows, None]) & (place < whole.lengths[r : r + rows, None])
        parts.append(sum_tokens(values, is_continuation))
    return torch.cat(parts).view(B, N)


def telling_example(model: PreTrainedModel) -> Continuations:
    """Return what a way of reading is checked on when a model is loaded: two short contexts of different length."""
    # tokens from all over: the first ones are often special, and absurd strings of them drown in rounding
    v = [(997 * i + 17) % model.config.get_text_config().vocab_size for i in range(11)]
    x = Continuations.from_lists([v[:5], v[:2]], [[v[5:9], v[7:11]], [v[2:6], v[3:7]]])
    return x.to(model.device)


def trace_after(
    model: PreTrainedModel,
    first: First,
    layers: tuple[int, ...],
    x: Continuations,
    edit: Edit | None = None,
    *,
    after: bool = False,
) -> Recorder:
    """Return the trace of continuations whose contexts have been read."""
    (B, N, L), recorder = x.tokens.shape, Recorder()
    log_first = first.log_p if edit is None else applied(edit, first.log_p)
    recorder.add(log_first.view(B, 1, 1, -1).expand(B, N, 1, -1), x.tokens[:, :, :1], x.mask[:, :, :1])
    states = first.states.view(B, 1, 1, *first.states.shape[1:]).expand(B, N, 1, -1, -1)
    if L + after > 1:
        if after:  # one token more, so that the last one is read
            x = Continuations(x.contexts, torch.cat([x.tokens, x.tokens[:, :, -1:]], dim=2), x.lengths)
        out = later(model, first.prefix, x, shows=bool(layers))
        log_p, later_states = (
            value.unflatten(0, (B, N))
            for value in (log_softmax(out.logits), states_at(out, layers, x.tokens[:, :, 1:].flatten(0, 1)))
        )
        log_p, tokens = log_p[:, :, : L - 1], x.tokens[:, :, :L]
        if edit is not None:
            log_p = applied_after(edit, log_p, tokens[:, :, :-1])
        recorder.add(log_p, tokens[:, :, 1:], x.mask[:, :, 1:L])
        states = later_states if after else torch.cat([states, later_states], dim=2)
    recorder.add_states(states, x.mask[:, :, :L])
    return recorder


def trace_whole(
    model: PreTrainedModel, layers: tuple[int, ...], x: Continuations, edit: Edit | None = None, *, after: bool = False
) -> Recorder:
    """Return the trace from a stock forward pass through whole strings."""
    (B, N, L), whole, recorder = x.tokens.shape, x.joined(), Recorder()
    out = model(whole.tokens, use_cache=False, output_hidden_states=bool(layers))
    place = x.contexts.lengths.repeat_interleave(N).unsqueeze(1) - 1 + torch.arange(L, device=whole.tokens.device)
    row = row_numbers(place).unsqueeze(1)
    seen = (place + after).clamp(max=whole.tokens.shape[1] - 1)
    found = (log_softmax(out.logits[row, place]), states_at(out, layers, whole.tokens)[row, seen])
    log_p, states = (value.unflatten(0, (B, N)) for value in found)
    if edit is not None:
        log_first = applied(edit, log_p[:, 0, 0]).view(B, 1, 1, -1).expand(B, N, 1, -1)
        log_p = torch.cat([log_first, applied_after(edit, log_p[:, :, 1:], x.tokens[:, :, :-1])], dim=2)
    recorder.add(log_p, x.tokens, x.mask)
    recorder.add_states(states, x.mask)
    return recorder


def row_numbers(values: Tensor) -> Int[Tensor, " R"]:
    """Return 0 … R − 1, to index with."""
    return torch.arange(len(values), device=values.device)


def states_at(out: Any, layers: tuple[int, ...], tokens: Int[Tensor, "R S"]) -> Float[Tensor, "R S K H"]:
    """Return hidden states of the chosen layers at each token that was read."""
    if not layers:
        return torch.zeros(*tokens.shape, 0, 0, device=tokens.device)
    return torch.stack([out.hidden_states[layer] for layer in layers], dim=-2)


def log_softmax(logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Compute log P from logits, at least in float32."""
    return normalised(logits if logits.dtype == torch.float64 else logits.float())


def picked(logits: Float[Tensor, "R L V"], tokens: Int[Tensor, "R L"]) -> Float[Tensor, "R L"]:
    """Compute the log-probability of the given tokens, without a second array of R × L × V."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def at(logits: Float[Tensor, "B kept V"], last: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """Return the logits at each row's own last place, out of those kept for any row."""
    kept = last.unique()
    # a model that knows no logits_to_keep returns every place
    column = torch.searchsorted(kept, last) if logits.shape[1] == len(kept) else last
    return logits[row_numbers(last), column]
