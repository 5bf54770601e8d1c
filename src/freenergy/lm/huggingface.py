"""Any causal language model of Hugging Face, with exact log-probabilities and exact samples.

    log P_LM(x | c) = Σ_t log softmax(logits(c, x_<t))[x_t]

A context is read once; its N continuations share its keys and values. Of three ways the fastest is taken that a
comparison with a plain forward pass on loading allows: steps of our own (``decoding``), the model's own steps with our
attention (``shared_prefix``), or whole strings at a time: slower, as exact.
"""

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm import network_steps as steps
from freenergy.lm.activations import Recorder, Trace, traced_ancestral
from freenergy.lm.checkpoints import checked_path, load_checkpoint, save_checkpoint
from freenergy.lm.decoding import sampling
from freenergy.lm.decoding.fused import Fused
from freenergy.lm.decoding.load import Decoder, FastStepper, rows_at_once
from freenergy.lm.editing import Edit, EditedStepper, EditMaker, applied
from freenergy.lm.padding import Padding, without_padding
from freenergy.lm.shared_prefix import Prefix
from freenergy.lm.stepping import PlainStepper, ancestral, check_fits, in_chunks, started, sum_dtype, sum_tokens

FUSED = "FREENERGY_FUSED"  # the environment variable that asks for compiled steps
_LOGITS = 2**25  # numbers of logits held at once: 128 MB in float32
_PREFIXES = 2**28  # bytes for the keys and values of contexts
_ROWS = 256  # continuations sampled at once by the model's own steps

Stepping = FastStepper | steps.SharedStepper | PlainStepper | EditedStepper


@final
class HuggingFaceLM:
    """P_LM from an ``AutoModelForCausalLM``.

    The model is taken as it is: weights frozen, dropout off. Log-probabilities are computed in the model's precision,
    at least float32, and summed in float64. ``fused`` samples with compiled steps where there is a compiler (None: as
    the environment variable FREENERGY_FUSED says); numbers then differ in their last digits.
    """

    kind: ClassVar[str] = "huggingface"
    record_keys: ClassVar[tuple[str, ...]] = ("path",)
    draws_here = True

    def __init__(self, model: PreTrainedModel, *, eos: int, fused: bool | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.eos = eos
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_length: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.num_layers: int = model.config.get_text_config().num_hidden_layers
        self.width: int = model.config.get_text_config().hidden_size
        self.shares_prefix = model._supports_attention_backend and self._shared_equals_plain()
        is_fused = os.environ.get(FUSED, "0") not in ("", "0") if fused is None else fused
        self._decoder = Decoder.of(model, compiled=is_fused) if self.shares_prefix else None
        self._edit: EditMaker | None = None
        self.padding = Padding()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, eos: int | None = None, device: str | torch.device | None = None,
        fused: bool | None = None, vocab_size: int | None = None,
    ) -> "HuggingFaceLM":  # fmt: skip
        """Load a checkpoint folder or a GGUF file, without code; rows from ``vocab_size`` on are left out."""
        model, stored_eos = load_checkpoint(Path(path), device=device)
        own_eos = stored_eos if eos is None else eos
        padding = without_padding(model, vocab_size, own_eos)  # first: the decoder copies what it reads
        found = cls(model, eos=own_eos, fused=fused)
        found.padding = padding
        return found

    def edited(self, edit: EditMaker) -> "HuggingFaceLM":
        """Return a model of the same weights whose predictions are edited before anything is drawn or recorded."""
        other = copy.copy(self)
        other._edit = edit
        return other

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config and safetensors, completely or not at all."""
        save_checkpoint(self.model, Path(folder), eos=self.eos)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the checkpoint into ``folder/base``."""
        self.save_pretrained(folder / "base")
        return {"path": "base"}

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "HuggingFaceLM":
        """Load the checkpoint that the record names."""
        return cls.from_pretrained(checked_path(folder, record), eos=tokenizer.eos, vocab_size=tokenizer.vocab_size)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return torch.device(self.model.device)

    @property
    def _fast(self) -> Decoder | None:
        """Return the decoder, as long as the weights are of a kind that it knows: they may have been cast since."""
        return self._decoder if self._decoder is not None and self._decoder.knows_weights else None

    @property
    def decodes_by(self) -> Literal["compiled steps", "own steps", "the model's steps", "whole strings"]:
        """Return how continuations are sampled, from the fastest way to the slowest."""
        if self._fast is not None:
            return "compiled steps" if isinstance(self._fast.kernels_for(), Fused) else "own steps"
        return "the model's steps" if self.shares_prefix else "whole strings"

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c); differentiable where the model's weights ask for gradients."""
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        B, N, L = x.tokens.shape
        if not B or not N or not L:
            return torch.zeros(B, N, dtype=sum_dtype(self.device), device=self.device)
        check_fits(x.contexts, L, self.max_length)
        if self._edit is not None:
            return self.trace(x, ()).log_p.sum(-1)
        score = self._log_prob_shared if self.shares_prefix else partial(steps.log_prob_whole, self.model)
        rows = max(1, _LOGITS // (self.vocab_size * L))
        return torch.cat([score(x[b : b + max(1, rows // N)], rows) for b in range(0, B, max(1, rows // N))])

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P_LM(v | c) for every token v."""
        contexts = started(contexts, self.eos).trimmed().to(self.device)
        check_fits(contexts, 0, self.max_length)
        log_p = steps.predict_next(self.model, contexts)[0]
        return log_p if self._edit is None else applied(self._edit(contexts, 0), log_p)

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context."""
        draw = ancestral if self._fast is None else sampling.sample
        return self._sample(contexts, num, space, rng, truncation, (), draw)

    def sample_traced(
        self,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation = ANCESTRAL,
        layers: Sequence[int] = (),
        data: Continuations | None = None,
        *,
        after: bool = False,
    ) -> tuple[Draws, Trace]:
        """Return the same draws, and the trace that ``trace`` would read from ``data`` and them, at little cost."""
        traces, of_data = list[Trace](), list[Trace]()
        traced = partial(traced_ancestral if self._fast is None else sampling.sample_traced, after=after)

        def draw(*rest: Any) -> Draws:
            draws, trace = traced(*rest)
            traces.append(trace)
            return draws

        def see(first: steps.First | None, readable: Sequences, some: slice) -> None:
            if data is not None:
                x = Continuations(readable, data[some].tokens.to(self.device), data[some].lengths.to(self.device))
                of_data.append(self._trace(x, first, tuple(layers), after=after).padded(space.length))

        draws = self._sample(contexts, num, space, rng, truncation, tuple(layers), draw, see)
        parts = -(-num // self._rows_at_once(space.length))  # of one context's candidates
        chunks = [Trace.cat(traces[i : i + parts], dim=1) for i in range(0, len(traces), parts)]
        trace = Trace.cat(chunks, dim=0)
        return draws, trace if data is None else Trace.cat([Trace.cat(of_data, dim=0), trace], dim=1)

    @torch.no_grad()
    def stepper(self, contexts: Sequences, num: int, length: int) -> Stepping:
        """Return a stepper at the start of ``num`` continuations of each context, of at most ``length`` tokens."""
        readable = started(contexts.to(self.device), self.eos).trimmed()
        check_fits(readable, length, self.max_length)
        return self._stepping(readable, self._read(readable, ()), length, ())(num)

    @torch.no_grad()
    def trace(self, x: Continuations, layers: Sequence[int], *, after: bool = False) -> Trace:
        """Record what the model computes on given continuations; ``layers`` 0 (embeddings) … num_layers."""
        padded = x.tokens.shape[2]
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        B, N, L = x.tokens.shape
        if not B or not N or not L:
            return Trace.of_nothing(B, N, padded, len(layers), self.width, self.device)
        check_fits(x.contexts, L, self.max_length)
        return self._trace(x, None, tuple(layers), after=after).padded(padded)

    def _trace(self, x: Continuations, first: steps.First | None, layers: tuple[int, ...], *, after: bool) -> Trace:
        """Return the trace of continuations; ``first`` is what was read of their contexts, where that was done."""
        B, N, L = x.tokens.shape
        width = L if self.shares_prefix else L + x.contexts.tokens.shape[1]
        rows = max(1, _LOGITS // (4 * self.vocab_size * width))  # four arrays of this size stand side by side
        contexts, chunks = max(1, rows // N), []
        for b in range(0, B, contexts):
            some = slice(b, b + contexts)
            read = self._read(x.contexts[some], layers) if first is None else first.some(some)
            trace = partial(self._tracer(x.contexts[some], read, layers, L), after=after)
            parts = [trace(x[some].candidates(slice(n, n + rows))).trace(L) for n in range(0, N, rows)]
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
        see: Callable[[steps.First | None, Sequences, slice], None] = lambda first, readable, some: None,
    ) -> Draws:
        """Draw; ``see`` is shown what was read of some contexts before their continuations are drawn."""
        contexts = contexts.to(self.device)
        readable = started(contexts, self.eos).trimmed()
        check_fits(readable, space.length, self.max_length)

        def begin(some: slice) -> Callable[[int], Stepping]:
            first = self._read(readable[some], layers)
            see(first, readable[some], some)
            return self._stepping(readable[some], first, space.length, layers)

        # as many contexts as their keys and values fit
        each = 2 * self.num_layers * self.width * readable.tokens.shape[1] * self.model.dtype.itemsize
        most = max(1, _PREFIXES // int(each))
        if self._fast is not None:
            most = min(most, self._fast.contexts_at_once(num, space.length))
        sizes = {"rows": self._rows_at_once(space.length), "most_contexts": most}
        return in_chunks(begin, contexts, num, space, rng, truncation, draw=draw, **sizes)

    def _read(self, contexts: Sequences, layers: tuple[int, ...]) -> steps.First | None:
        """Read contexts once; None where their continuations cannot use it."""
        return steps.read(self.model, contexts, layers) if self.shares_prefix else None

    def _stepping(
        self, contexts: Sequences, first: steps.First | None, length: int, layers: tuple[int, ...]
    ) -> Callable[[int], Stepping]:
        """Return what makes steppers of any number of continuations of contexts that have been read."""
        edit = self._edits(contexts, length)
        if first is None:
            plain = partial(steps.predict_next, self.model, layers=layers)
            return lambda count: _edited(PlainStepper(plain, contexts, count), edit())
        if self._fast is not None:
            return self._fast.starting(first, length, layers, edit)
        return lambda count: _edited(steps.SharedStepper(self.model, first, count, length, layers), edit())

    def _rows_at_once(self, length: int) -> int:
        if self._fast is not None:
            return rows_at_once(self._fast.network, length)
        return max(1, min(_ROWS, _LOGITS // self.vocab_size))

    def _log_prob_shared(self, x: Continuations, rows: int) -> Float[Tensor, "B N"]:
        log_first, prefix, _ = steps.read(self.model, x.contexts)
        parts = [x.candidates(slice(n, n + rows)) for n in range(0, x.shape[1], rows)]
        return torch.cat([self._after(prefix, log_first, part) for part in parts], dim=1)

    def _edits(self, contexts: Sequences, length: int) -> Callable[[], Edit | None]:
        """Return what makes an edit for the continuations of some contexts, once for each part of them."""
        make = self._edit
        return lambda: None if make is None else make(contexts, length)

    def _tracer(
        self, contexts: Sequences, first: steps.First | None, layers: tuple[int, ...], length: int
    ) -> Callable[..., Recorder]:
        """Return what traces continuations of these contexts."""
        edit = self._edits(contexts, length)
        if first is None:
            return lambda x, after: steps.trace_whole(self.model, layers, x, edit(), after=after)
        return lambda x, after: steps.trace_after(self.model, first, layers, x, edit(), after=after)

    def _after(self, prefix: Prefix, log_first: Float[Tensor, "B V"], x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P of continuations whose contexts have been read."""
        B, N, L = x.tokens.shape
        values = log_first.gather(1, x.tokens[:, :, 0]).unsqueeze(-1)
        if L > 1:
            logits = steps.later(self.model, prefix, x).logits
            rest = steps.picked(logits, x.tokens[:, :, 1:].flatten(0, 1)).view(B, N, L - 1)
            values = torch.cat([values, rest], dim=-1)
        return sum_tokens(values, x.mask)

    @torch.no_grad()
    def _shared_equals_plain(self) -> bool:
        """Check that this architecture gives the same numbers both ways."""
        x = steps.telling_example(self.model)
        if self.max_length is not None and self.max_length < x.joined().tokens.shape[1]:
            return False
        try:
            shared, plain = self._log_prob_shared(x, rows=8), steps.log_prob_whole(self.model, x, rows=8)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, IndexError):
            return False
        return torch.allclose(shared, plain, rtol=0, atol=steps.TOLERANCE)


def _edited(stepper: steps.SharedStepper | PlainStepper, edit: Edit | None) -> Stepping:
    return stepper if edit is None else EditedStepper(stepper, edit)
