"""Any causal language model of Hugging Face, with exact log-probabilities and exact samples.

    log P_LM(x | c) = Σ_t log softmax(logits(c, x_<t))[x_t]

A context is read once; its N continuations share its keys and values (``shared_prefix``). Models that do not fetch
their attention from transformers' interface, or whose attention has parts that we do not know, are found out on
loading by a comparison with a plain forward pass and are then read plainly, whole strings at a time: slower, as exact.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from freenergy.base.checkpoints import load_checkpoint, save_checkpoint
from freenergy.base.network_steps import (
    First,
    SharedStepper,
    at,
    log_softmax,
    picked,
    row_numbers,
    states_at,
)
from freenergy.base.shared_prefix import Prefix, attending_to
from freenergy.base.stepping import (
    Next,
    PlainStepper,
    ancestral,
    check_fits,
    in_chunks,
    started,
    sum_dtype,
    sum_tokens,
)
from freenergy.base.traces import Recorder, Trace, TracedStepper
from freenergy.protocols import ANCESTRAL, Draws, Truncation
from freenergy.randomness import Rng
from freenergy.sequences import Continuations, Sequences, SequenceSpace

_LOGITS = 2**25  # numbers of logits held at once: 128 MB in float32
_ROWS = 256  # continuations sampled at once


@final
class HuggingFaceLM:
    """P_LM from an ``AutoModelForCausalLM``.

    The model is taken as it is: weights frozen, dropout off. Log-probabilities are computed in the model's precision,
    at least float32, and summed in float64.
    """

    def __init__(self, model: PreTrainedModel, *, eos: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.eos = eos
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.num_layers: int = model.config.get_text_config().num_hidden_layers
        self.width: int = model.config.get_text_config().hidden_size
        self.shares_prefix = model._supports_attention_backend and self._shared_equals_plain()

    @classmethod
    def from_pretrained(cls, path: str | Path, *, eos: int | None = None, device: str = "cpu") -> "HuggingFaceLM":
        """Load a checkpoint folder (safetensors) or a GGUF file; never runs code from it."""
        model, stored_eos = load_checkpoint(Path(path), device=device)
        return cls(model, eos=stored_eos if eos is None else eos)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config and safetensors, whole or not at all."""
        save_checkpoint(self.model, Path(folder), eos=self.eos)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P_LM(x | c); differentiable where the model's weights ask for gradients."""
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        B, N, L = x.tokens.shape
        if not B or not N or not L:
            return torch.zeros(B, N, dtype=sum_dtype(self.device), device=self.device)
        check_fits(x.contexts, L, self.max_length)
        score = self._log_prob_shared if self.shares_prefix else self._log_prob_plain
        rows = max(1, _LOGITS // (self.vocab_size * L))
        contexts = max(1, rows // N)
        return torch.cat([score(x[b : b + contexts], rows) for b in range(0, B, contexts)])

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """log P_LM(v | c) for every token v."""
        contexts = started(contexts, self.eos).trimmed().to(self.device)
        check_fits(contexts, 0, self.max_length)
        return self._next(contexts)[0]

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """``num`` independent continuations of each context."""
        return self._sample(contexts, num, space, rng, truncation, (), ancestral)

    def sample_traced(
        self,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation = ANCESTRAL,
        layers: Sequence[int] = (),
    ) -> tuple[Draws, Trace]:
        """The same draws, and the trace that ``trace`` would read from them, at next to no cost."""
        traces: list[Trace] = []

        def draw(stepper: Any, some: Sequences, count: int, *rest: Any) -> Draws:
            traced = TracedStepper(stepper, count, space.eos)
            draws = ancestral(traced, some, count, *rest)
            traces.append(traced.finish(draws.x))
            return draws

        draws = self._sample(contexts, num, space, rng, truncation, tuple(layers), draw)
        parts = -(-num // self._rows_at_once())  # of one context's candidates
        chunks = [Trace.cat(traces[i : i + parts], dim=1) for i in range(0, len(traces), parts)]
        return draws, Trace.cat(chunks, dim=0)

    @torch.no_grad()
    def stepper(self, contexts: Sequences, num: int, length: int) -> SharedStepper | PlainStepper:
        """At the start of ``num`` continuations of each context, of at most ``length`` tokens."""
        readable = started(contexts.to(self.device), self.eos).trimmed()
        check_fits(readable, length, self.max_length)
        return self._stepping(readable, length, ())(num)

    @torch.no_grad()
    def trace(self, x: Continuations, layers: Sequence[int]) -> Trace:
        """What the model computes on the way through given continuations; ``layers`` 0 (embeddings) … num_layers."""
        B, N, padded = x.tokens.shape
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        L = x.tokens.shape[2]
        if not B or not N or not L:
            return Trace.of_nothing(B, N, padded, len(layers), self.width, self.device)
        check_fits(x.contexts, L, self.max_length)
        width = L if self.shares_prefix else L + x.contexts.tokens.shape[1]
        rows = max(1, _LOGITS // (4 * self.vocab_size * width))  # four arrays of this size stand side by side
        contexts, chunks = max(1, rows // N), []
        for b in range(0, B, contexts):
            some = x[b : b + contexts]
            read = self._tracer(some.contexts, tuple(layers))
            parts = [read(some.candidates(slice(n, n + rows))).trace(padded) for n in range(0, N, rows)]
            chunks.append(Trace.cat(parts, dim=1))
        return Trace.cat(chunks, dim=0)

    @torch.no_grad()
    def _sample(
        self,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation,
        layers: tuple[int, ...],
        draw: Callable[..., Draws],
    ) -> Draws:
        contexts = contexts.to(self.device)
        readable = started(contexts, self.eos).trimmed()
        check_fits(readable, space.length, self.max_length)

        def read(some: slice) -> Callable[[int], SharedStepper | PlainStepper]:
            return self._stepping(readable[some], space.length, layers)

        return in_chunks(read, contexts, num, space, rng, truncation, rows=self._rows_at_once(), draw=draw)

    def _stepping(
        self, contexts: Sequences, length: int, layers: tuple[int, ...]
    ) -> Callable[[int], SharedStepper | PlainStepper]:
        """Read contexts once, for steppers of any number of their candidates."""
        if not self.shares_prefix:
            return lambda count: PlainStepper(partial(self._next, layers=layers), contexts, count)
        first = self._read(contexts, layers)
        return lambda count: SharedStepper(self.model, first, count, length, layers)

    def _rows_at_once(self) -> int:
        return max(1, min(_ROWS, _LOGITS // self.vocab_size))

    def _next(self, contexts: Sequences, layers: tuple[int, ...] = ()) -> Next:
        """log P of what comes next, and the states [B, K, H] that say so."""
        last, show = contexts.lengths - 1, {"output_hidden_states": bool(layers)}
        out = self.model(contexts.tokens, use_cache=False, logits_to_keep=last.unique(), **show)
        return log_softmax(at(out.logits, last)), states_at(out, layers, contexts.tokens)[row_numbers(last), last]

    def _read(self, contexts: Sequences, layers: tuple[int, ...] = ()) -> First:
        """Read the contexts once: log P of what comes next, and what the continuations need to remember."""
        last, show = contexts.lengths - 1, {"output_hidden_states": bool(layers)}
        cache = DynamicCache()  # without the config: a sliding window is the attention's business, nothing is forgotten
        out = self.model(contexts.tokens, past_key_values=cache, use_cache=True, logits_to_keep=last.unique(), **show)
        log_first, prefix = log_softmax(at(out.logits, last)), Prefix.from_cache(cache, contexts.lengths)
        return First(log_first, prefix, states_at(out, layers, contexts.tokens)[row_numbers(last), last])

    def _log_prob_shared(self, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
        log_first, prefix, _ = self._read(x.contexts)
        parts = [x.candidates(slice(n, n + rows)) for n in range(0, x.shape[1], rows)]
        return torch.cat([self._after(prefix, log_first, part) for part in parts], dim=1)

    def _tracer(self, contexts: Sequences, layers: tuple[int, ...]) -> Callable[[Continuations], Recorder]:
        """What traces continuations of these contexts, which are read once where that can be."""
        if self.shares_prefix:
            return partial(self._trace_after, self._read(contexts, layers), layers)
        return partial(self._trace_plain, layers)

    def _after(self, prefix: Prefix, log_first: Float[Tensor, "B V"], x: Continuations) -> Float[Tensor, "B N"]:
        """log P of continuations whose contexts have been read."""
        B, N, L = x.tokens.shape
        values = log_first.gather(1, x.tokens[:, :, 0]).unsqueeze(-1)
        if L > 1:
            logits = self._later(prefix, x).logits
            later = picked(logits, x.tokens[:, :, 1:].flatten(0, 1)).view(B, N, L - 1)
            values = torch.cat([values, later], dim=-1)
        return sum_tokens(values, x.mask)

    def _later(self, prefix: Prefix, x: Continuations, *, shows: bool = False) -> Any:
        """The model's output at all but the last token of continuations whose contexts have been read."""
        B, N, L = x.tokens.shape
        place = prefix.lengths.view(B, 1, 1) + torch.arange(L - 1, device=self.device)
        place, read = place.expand(B, N, L - 1).flatten(0, 1), x.tokens[:, :, :-1].flatten(0, 1)
        with attending_to(prefix, self.model):
            return self.model(read, position_ids=place, use_cache=False, output_hidden_states=shows)

    def _trace_after(self, first: First, layers: tuple[int, ...], x: Continuations) -> Recorder:
        """The trace of continuations whose contexts have been read."""
        (B, N, L), recorder = x.tokens.shape, Recorder()
        log_p, states = (value.unsqueeze(1).unsqueeze(1) for value in (first.log_p, first.states))
        recorder.add(log_p.expand(B, N, 1, -1), states.expand(B, N, 1, -1, -1), x.tokens[:, :, :1], x.mask[:, :, :1])
        if L > 1:
            out = self._later(first.prefix, x, shows=bool(layers))
            later = (log_softmax(out.logits), states_at(out, layers, x.tokens[:, :, 1:].flatten(0, 1)))
            log_p, states = (value.unflatten(0, (B, N)) for value in later)
            recorder.add(log_p, states, x.tokens[:, :, 1:], x.mask[:, :, 1:])
        return recorder

    def _trace_plain(self, layers: tuple[int, ...], x: Continuations) -> Recorder:
        """The trace from a stock forward pass through whole strings."""
        (B, N, L), whole, recorder = x.tokens.shape, x.joined(), Recorder()
        out = self.model(whole.tokens, use_cache=False, output_hidden_states=bool(layers))
        place = x.contexts.lengths.repeat_interleave(N).unsqueeze(1) - 1 + torch.arange(L, device=self.device)
        row = row_numbers(place).unsqueeze(1)
        found = (log_softmax(out.logits[row, place]), states_at(out, layers, whole.tokens)[row, place])
        log_p, states = (value.unflatten(0, (B, N)) for value in found)
        recorder.add(log_p, states, x.tokens, x.mask)
        return recorder

    def _log_prob_plain(self, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
        """Whole strings through a stock forward pass; also the reference that the shared way is checked against."""
        (B, N), P = x.shape, x.contexts.tokens.shape[1]
        whole, starts = x.joined(), x.contexts.lengths.repeat_interleave(N)
        rows = max(1, rows * x.tokens.shape[2] // whole.tokens.shape[1])
        parts = []
        for r in range(0, B * N, rows):
            tokens = whole.tokens[r : r + rows]
            values = picked(self.model(tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])
            place = torch.arange(1, P + x.tokens.shape[2], device=self.device)
            is_continuation = (place >= starts[r : r + rows, None]) & (place < whole.lengths[r : r + rows, None])
            parts.append(sum_tokens(values, is_continuation))
        return torch.cat(parts).view(B, N)

    @torch.no_grad()
    def _shared_equals_plain(self) -> bool:
        """Does this architecture give the same numbers both ways? Two short contexts of different length tell."""
        # tokens from all over: the first ones are often special, and absurd strings of them drown in rounding
        v = [(997 * i + 17) % self.vocab_size for i in range(11)]
        x = Continuations.from_lists([v[:5], v[:2]], [[v[5:9], v[7:11]], [v[2:6], v[3:7]]]).to(self.device)
        if self.max_length is not None and self.max_length < 9:
            return False
        try:
            shared, plain = self._log_prob_shared(x, rows=8), self._log_prob_plain(x, rows=8)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, IndexError):
            return False
        return torch.allclose(shared, plain, rtol=0, atol=5e-4)
