"""Numbers from the output of a transformers model, and the stepper that samples with one.

    log P(v | c, x_<t) = log softmax(logits)[v],      states: hidden states of chosen layers, 0 the embeddings

Legend: R rows, S tokens of each that were read, K layers chosen, H width of the states.
"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.base.shared_prefix import Prefix, attending_to, continuation_cache
from freenergy.base.stepping import exchanged
from freenergy.protocols import normalised


class First(NamedTuple):
    """Contexts that have been read."""

    log_p: Float[Tensor, "B V"]  # of the first token that follows
    prefix: Prefix
    states: Float[Tensor, "B K H"]  # at the last token


@final
class SharedStepper:
    """Reads one token of each row at a time; the prefix stays in one copy."""

    def __init__(self, model: PreTrainedModel, first: First, num: int, length: int, layers: tuple[int, ...]) -> None:
        self.model, self.log_first, self.prefix, self.layers = model, first.log_p, first.prefix, layers
        self.states = first.states.unsqueeze(1)
        self.cache = continuation_cache(len(first.prefix.keys), length)
        self.place = first.prefix.lengths.repeat_interleave(num).unsqueeze(1)

    def first(self) -> Float[Tensor, "B V"]:
        """log P of the first token."""
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


def row_numbers(values: Tensor) -> Int[Tensor, " R"]:
    """0 … R − 1, to index with."""
    return torch.arange(len(values), device=values.device)


def states_at(out: Any, layers: tuple[int, ...], tokens: Int[Tensor, "R S"]) -> Float[Tensor, "R S K H"]:
    """Hidden states of the chosen layers at each token that was read."""
    if not layers:
        return torch.zeros(*tokens.shape, 0, 0, device=tokens.device)
    return torch.stack([out.hidden_states[layer] for layer in layers], dim=-2)


def log_softmax(logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """log P from logits, at least in float32."""
    return normalised(logits if logits.dtype == torch.float64 else logits.float())


def picked(logits: Float[Tensor, "R L V"], tokens: Int[Tensor, "R L"]) -> Float[Tensor, "R L"]:
    """Log-probability of the given tokens, without a second array of R × L × V."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def at(logits: Float[Tensor, "B kept V"], last: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """The logits at each row's own last place, out of those kept for any row."""
    kept = last.unique()
    # a model that knows no logits_to_keep returns every place
    column = torch.searchsorted(kept, last) if logits.shape[1] == len(kept) else last
    return logits[row_numbers(last), column]
