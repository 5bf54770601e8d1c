"""A network without its head, read in one of three ways.

    causal          h_t of the prefix and of x sees what came before it
    bidirectional   every h_t sees all of c and x
    prefix_once     h_t of the prefix sees all of c; h_t of x sees all of c and x

In the first and the last the prefix's states do not depend on x, so they are computed once for N continuations.

    E = w · pool(h) + b,      pool(h) = Σ h   or   Σ h / (how many),      w = 0 and b = 0 at the start

The sum runs over the real tokens of the continuation, or of prefix and continuation. Over nothing it is 0, so E = b.

Legend: B contexts, N continuations of each, R = B·N rows, M prefix readings of a context (1 or N), P prefix tokens,
L continuation tokens, T tokens of whole strings, H width.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, final, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations, Sequences, Soft
from freenergy.energies.settings import Over, Pool
from freenergy.lm.shared_prefix import Prefix, attending_to, remembering, seeing_both_ways
from freenergy.lm.stepping import check_fits, started

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Int[Tensor, "*rows S"] | Float[Tensor, "*rows S H"]  # tokens, or embeddings
Reading = Literal["causal", "bidirectional", "prefix_once"]
_UNREADABLE = (NotImplementedError, TypeError, AttributeError, RuntimeError, IndexError, ValueError)


@final
@dataclass(frozen=True, slots=True)
class States:
    """Last hidden states of prefixes and continuations; masks are true at tokens that count."""

    prefix: Float[Tensor, "B M P H"]
    prefix_mask: Bool[Tensor, "B M P"]
    x: Float[Tensor, "B N L H"]
    mask: Bool[Tensor, "B N L"]


@final
class Trunk(nn.Module):
    """A Hugging Face network that gives hidden states in the reading that it was made for.

    Whether the network obeys is found out here: a short text is also read by the network's own attention under a mask
    that says the same.
    """

    def __init__(self, network: "PreTrainedModel", reading: Reading) -> None:
        super().__init__()
        self.network, self.reading = network, reading
        config = network.config.get_text_config()
        self.width: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(network.forward).parameters else {}
        # some encoders count their places from behind the padding token's
        offsets = [0] if config.pad_token_id is None else [0, config.pad_token_id + 1]
        found = [offset for offset in offsets if self._obeys(offset)]
        if not found and reading != "causal":
            raise UserError(
                f"{type(network).__name__} cannot be read in both directions (it has no attention, or one of its own "
                'kind): take another network, or kind = "unit"'
            )
        self.offset = found[0] if found else 0
        self.shares_prefix = bool(found) and reading != "bidirectional"
        places = getattr(config, "max_position_embeddings", None)
        self.max_length: int | None = None if places is None else places - self.offset

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        device: torch.device = self.network.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states."""
        dtype: torch.dtype = self.network.dtype
        return dtype

    def forward(self, x: Continuations | Soft) -> States:
        """Compute the states of contexts, none of them empty, and of their continuations."""
        self.check(x)
        return self.after(x.contexts)(x) if self.shares_prefix else self._separate(x)

    def check(self, x: Continuations | Soft) -> None:
        """Refuse strings that are too long, or have tokens that the network does not know."""
        check_fits(x.contexts, x.mask.shape[2], self.max_length)
        parts = [x.contexts.tokens] if isinstance(x, Soft) else [x.contexts.tokens, x.tokens]
        largest = max(int(part.max()) if part.numel() else 0 for part in parts)
        if largest >= self.vocab_size:
            raise UserError(
                f"the text has token {largest}, but the energy's network knows {self.vocab_size} tokens: "
                "train the energy with the tokenizer of this text"
            )

    def whole(self, rows: Sequences) -> Float[Tensor, "R T H"]:
        """Compute the states of whole strings, seen in both directions unless the reading is causal."""
        return self._whole(rows.tokens, rows.lengths)

    def _whole(self, rows: Inputs, lengths: Int[Tensor, " R"]) -> Float[Tensor, "R T H"]:
        if self.reading == "causal":  # padding comes last, so no token sees it
            return self._states(rows)
        with seeing_both_ways(self.network, lengths):
            return self._states(rows, torch.zeros_like(lengths[:1]))

    def after(self, contexts: Sequences) -> Callable[[Continuations | Soft], States]:
        """Read contexts, none of them empty, once; what is returned reads continuations of theirs."""
        prefix_states, prefix = self._read(contexts)

        def read(x: Continuations | Soft) -> States:
            B, N, L = x.mask.shape
            states = prefix_states.new_zeros(B, N, L, self.width)
            if states.numel():
                starts = prefix.lengths if B == 1 else prefix.lengths.repeat_interleave(N)
                with (
                    attending_to(prefix, self.network)
                    if self.reading == "causal"
                    else seeing_both_ways(self.network, x.lengths.flatten(), after=prefix)
                ):
                    states = self._states(self._inputs(x).flatten(0, 1), starts).view(B, N, L, -1)
            return States(prefix_states.unsqueeze(1), contexts.mask.unsqueeze(1), states, x.mask)

        return read

    def _read(self, contexts: Sequences) -> tuple[Float[Tensor, "B P H"], Prefix]:
        """Read the contexts once: their states, and what the continuations need to remember."""
        if self.reading == "causal":
            from transformers import DynamicCache

            cache = DynamicCache()
            states = self.network(contexts.tokens, past_key_values=cache, use_cache=True).last_hidden_state
            return states, Prefix.from_cache(cache, contexts.lengths)
        with remembering(self.network, contexts.lengths) as prefix:
            states = self._states(contexts.tokens, torch.zeros_like(contexts.lengths[:1]))
        return states, prefix

    def _separate(self, x: Continuations | Soft) -> States:
        """Read every string as a whole, then separate its two parts."""
        (B, N, L), P = x.mask.shape, x.contexts.tokens.shape[1]
        whole = self._whole(*self._joined(x)) if isinstance(x, Soft) else self.whole(x.joined())
        states = whole.view(B, N, P + L, self.width)
        place = x.contexts.lengths.view(B, 1, 1) + torch.arange(L, device=self.device)
        own = states.gather(2, place.expand(B, N, L).unsqueeze(-1).expand(B, N, L, self.width))
        prefix_mask = x.contexts.mask.unsqueeze(1).expand(B, N, P)
        return States(states[:, :, :P], prefix_mask, own, x.mask)

    def _inputs(self, x: Continuations | Soft) -> Inputs:
        """Return what the network reads of continuations: their tokens, or the embeddings of soft ones."""
        return x.embedded(self._table) if isinstance(x, Soft) else x.tokens

    @property
    def _table(self) -> Float[Tensor, "V H"]:
        table = self.network.get_input_embeddings().weight
        assert isinstance(table, Tensor), "embeddings are a table"
        return table

    def _joined(self, x: Soft) -> tuple[Float[Tensor, "R T H"], Int[Tensor, " R"]]:
        """Join the embeddings of whole strings, context then continuation with no gap, as ``Continuations.joined``."""
        (B, N, L), P = x.mask.shape, x.contexts.tokens.shape[1]
        places = torch.arange(P + L, device=self.device)
        numbers = Sequences(places[:P].expand(B, P), x.contexts.lengths)
        rows = Continuations(numbers, places[P:].expand(B, N, L), x.lengths).joined()
        prefix = self._table[x.contexts.tokens].unsqueeze(1).expand(B, N, P, -1)
        both = torch.cat([prefix, self._inputs(x)], dim=2).flatten(0, 1)
        return both.gather(1, rows.tokens.unsqueeze(-1).expand(-1, -1, both.shape[-1])), rows.lengths

    def _states(self, rows: Inputs, starts: Int[Tensor, " _"] | None = None) -> Float[Tensor, "R S H"]:
        """Call the network once; rows begin each at its own place, or all at one, which is less work."""
        options: dict[str, Any] = dict(self._options)
        if starts is not None:
            places = torch.arange(rows.shape[1], device=rows.device)
            options["position_ids"] = self.offset + starts.unsqueeze(1) + places
        options["inputs_embeds" if rows.is_floating_point() else "input_ids"] = rows
        states: Tensor = self.network(**options).last_hidden_state
        return states

    @torch.no_grad()
    def _obeys(self, offset: int) -> bool:
        """Check that our attention gives what the network's own gives under a mask of the same meaning."""
        if not self.network._supports_attention_backend:
            return False
        self.offset, training = offset, self.network.training
        x = self._example().to(self.device)
        self.network.eval()
        try:
            found = self._separate(x) if self.reading == "bidirectional" else self.after(x.contexts)(x)
            wanted = [
                self._by_own_attention(c, y) for c, ys in zip(x.contexts.lists(), x.lists(), strict=True) for y in ys
            ]
        except _UNREADABLE:
            return False
        finally:
            self.network.train(training)
        prefix = found.prefix.expand(-1, 2, -1, -1).flatten(0, 1)
        starts, states = x.contexts.lengths.repeat_interleave(2).tolist(), found.x.flatten(0, 1)
        ours = [torch.cat([c[:n], y]) for c, n, y in zip(prefix, starts, states, strict=True)]
        is_equal = all(
            torch.allclose(a, b, rtol=0, atol=1e-3 * float(b.abs().max())) for a, b in zip(ours, wanted, strict=True)
        )
        # two continuations differ in their last token alone: the first must see that, or must not
        sees_ahead = not torch.allclose(found.x[0, 0, 0], found.x[0, 1, 0], rtol=0, atol=1e-6)
        return is_equal and sees_ahead == (self.reading != "causal")

    def _example(self) -> Continuations:
        """Return two contexts, so that one is padded, and continuations that differ in their last token."""
        padding = self.network.config.get_text_config().pad_token_id
        known = [token for token in range(self.vocab_size) if token != padding]
        v = [known[(997 * i + 17) % len(known)] for i in range(10)]  # from all over: the first are often special
        other = known[(known.index(v[8]) + 1) % len(known)]
        return Continuations.from_lists([v[:5], v[:2]], [[v[5:9], [*v[5:8], other]], [v[2:6], v[3:7]]])

    def _by_own_attention(self, context: list[int], x: list[int]) -> Float[Tensor, "T H"]:
        """Read one string, without padding, with the network as it is."""
        tokens = torch.tensor([context + x], device=self.device)
        T, P, options = tokens.shape[1], len(context), dict[str, Any](self._options)
        if self.reading != "causal":
            hidden = torch.zeros(1, 1, T, T, device=self.device, dtype=self.network.dtype)
            if self.reading == "prefix_once":
                hidden[:, :, :P, P:] = torch.finfo(hidden.dtype).min
            options["attention_mask"] = hidden
        states: Tensor = self.network(tokens, **options).last_hidden_state[0]
        return states


@overload
def readable(x: Continuations, eos: int, device: torch.device) -> Continuations: ...
@overload
def readable(x: Soft, eos: int, device: torch.device) -> Soft: ...
def readable(x: Continuations | Soft, eos: int, device: torch.device) -> Continuations | Soft:
    """Move x to the weights, without idle padding; an empty context reads as the start of a document."""
    if isinstance(x, Soft):
        return replace(x, contexts=started(x.contexts, eos).trimmed()).to(device)
    return Continuations(started(x.contexts, eos), x.tokens, x.lengths).trimmed().to(device)


@final
class Readout(nn.Module):
    """A linear map of pooled states; it starts at zero, and so does the energy."""

    def __init__(self, width: int, *, pool: Pool, over: Over, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.pool, self.over = pool, over
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, states: States) -> Float[Tensor, "B N"]:
        """Compute one number per continuation."""
        total, count = _sum(states.x, states.mask), states.mask.sum(-1)
        if self.over == "all":
            total = total + _sum(states.prefix, states.prefix_mask)
            count = count + states.prefix_mask.sum(-1)
        if self.pool == "mean":
            total = total / count.clamp(min=1).unsqueeze(-1)
        return nn.functional.linear(total, self.weight, self.bias).squeeze(-1)


def _sum(states: Float[Tensor, "B N L H"], mask: Bool[Tensor, "B N L"]) -> Float[Tensor, "B N H"]:
    return (states * mask.unsqueeze(-1)).sum(2)
