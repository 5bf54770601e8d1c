"""Any causal language model of Hugging Face, with exact log-probabilities and exact samples.

    log P_LM(x | c) = Σ_t log softmax(logits(c, x_<t))[x_t]

A context is read once; its N continuations share its keys and values (``shared_prefix``). Models that do not fetch
their attention from transformers' interface, or whose attention has parts that we do not know, are found out on
loading by a comparison with a plain forward pass and are then read plainly, whole strings at a time: slower, as exact.
"""

from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from freenergy.base.checkpoints import load_checkpoint, save_checkpoint
from freenergy.base.shared_prefix import Prefix, attending_to, continuation_cache
from freenergy.base.stepping import check_fits, in_chunks, started, sum_dtype, sum_tokens
from freenergy.protocols import ANCESTRAL, Draws, Truncation, normalised
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
        last = contexts.lengths - 1
        logits = self.model(contexts.tokens, use_cache=False, logits_to_keep=last.unique()).logits
        return _log_softmax(_at(logits, last))

    @torch.no_grad()
    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """``num`` independent continuations of each context."""
        contexts = contexts.to(self.device)
        readable = started(contexts, self.eos).trimmed()
        check_fits(readable, space.length, self.max_length)

        def some(contexts_slice: slice) -> Callable[[int], _SharedStepper | _PlainStepper]:
            part = readable[contexts_slice]
            if not self.shares_prefix:
                return lambda count: _PlainStepper(self, part, count)
            log_first, prefix = self._read(part)
            return lambda count: _SharedStepper(self.model, log_first, prefix, count, space.length)

        rows = max(1, min(_ROWS, _LOGITS // self.vocab_size))
        return in_chunks(some, contexts, num, space, rng, truncation, rows=rows)

    def _read(self, contexts: Sequences) -> tuple[Float[Tensor, "B V"], Prefix]:
        """Read the contexts once: log P of what comes next, and what the continuations need to remember."""
        last = contexts.lengths - 1
        cache = DynamicCache()  # without the config: a sliding window is the attention's business, nothing is forgotten
        out = self.model(contexts.tokens, past_key_values=cache, use_cache=True, logits_to_keep=last.unique())
        return _log_softmax(_at(out.logits, last)), Prefix.from_cache(cache, contexts.lengths)

    def _log_prob_shared(self, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
        log_first, prefix = self._read(x.contexts)
        parts = [x.candidates(slice(n, n + rows)) for n in range(0, x.shape[1], rows)]
        return torch.cat([self._after(prefix, log_first, part) for part in parts], dim=1)

    def _after(self, prefix: Prefix, log_first: Float[Tensor, "B V"], x: Continuations) -> Float[Tensor, "B N"]:
        """log P of continuations whose contexts have been read."""
        B, N, L = x.tokens.shape
        values = log_first.gather(1, x.tokens[:, :, 0]).unsqueeze(-1)
        if L > 1:
            place = prefix.lengths.view(B, 1, 1) + torch.arange(L - 1, device=self.device)
            read = x.tokens[:, :, :-1].flatten(0, 1)
            with attending_to(prefix, self.model):
                logits = self.model(read, position_ids=place.expand(B, N, L - 1).flatten(0, 1), use_cache=False).logits
            later = _picked(logits, x.tokens[:, :, 1:].flatten(0, 1)).view(B, N, L - 1)
            values = torch.cat([values, later], dim=-1)
        return sum_tokens(values, x.mask)

    def _log_prob_plain(self, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
        """Whole strings through a stock forward pass; also the reference that the shared way is checked against."""
        (B, N), P = x.shape, x.contexts.tokens.shape[1]
        whole, starts = x.joined(), x.contexts.lengths.repeat_interleave(N)
        rows = max(1, rows * x.tokens.shape[2] // whole.tokens.shape[1])
        parts = []
        for r in range(0, B * N, rows):
            tokens = whole.tokens[r : r + rows]
            values = _picked(self.model(tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])
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
        except (NotImplementedError, TypeError, AttributeError, RuntimeError):
            return False
        return torch.allclose(shared, plain, rtol=0, atol=5e-4)


@final
class _SharedStepper:
    """Reads one token of each row at a time; the prefix stays in one copy."""

    def __init__(self, model: PreTrainedModel, log_first: Tensor, prefix: Prefix, num: int, length: int) -> None:
        self.model, self.log_first, self.prefix = model, log_first, prefix
        self.cache = continuation_cache(len(prefix.keys), length)
        self.place = prefix.lengths.repeat_interleave(num).unsqueeze(1)

    def first(self) -> Float[Tensor, "B V"]:
        return self.log_first

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        with attending_to(self.prefix, self.model):
            out = self.model(tokens.reshape(-1, 1), position_ids=self.place, past_key_values=self.cache, use_cache=True)
        self.place = self.place + 1
        return _log_softmax(out.logits[:, -1]).view(*tokens.shape, -1)


@final
class _PlainStepper:
    """Reads the whole string again for every token: for models that share nothing."""

    def __init__(self, lm: HuggingFaceLM, contexts: Sequences, num: int) -> None:
        self.lm, self.contexts = lm, contexts
        self.tokens = contexts.tokens.new_zeros(len(contexts), num, 0)

    def first(self) -> Float[Tensor, "B V"]:
        return self.lm.next_log_probs(self.contexts)

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(-1)], dim=-1)
        lengths = torch.full_like(tokens, self.tokens.shape[2])
        whole = Continuations(self.contexts, self.tokens, lengths).joined()
        return self.lm.next_log_probs(whole).view(*tokens.shape, -1)


def _log_softmax(logits: Tensor) -> Tensor:
    return normalised(logits if logits.dtype == torch.float64 else logits.float())


def _picked(logits: Float[Tensor, "R L V"], tokens: Int[Tensor, "R L"]) -> Float[Tensor, "R L"]:
    """Log-probability of the given tokens, without a second array of R × L × V."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def _at(logits: Float[Tensor, "B kept V"], last: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """The logits at each row's own last place, out of those kept for any row."""
    kept = last.unique()
    # a model that knows no logits_to_keep returns every place
    column = torch.searchsorted(kept, last) if logits.shape[1] == len(kept) else last
    return logits[torch.arange(len(last), device=last.device), column]
