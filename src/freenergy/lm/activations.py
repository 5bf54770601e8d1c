"""What a language model computes on the way through a continuation, kept.

    where x_t is predicted:   log p_t(x_t),   H(p_t) = −Σ_v p_t(v) log p_t(v),   log rank of x_t in p_t,   states

The places are those of the last context token, x_1, …, x_{L−1}: they are computed anyway while x is sampled. The states
are means over the places, one vector for each chosen layer; or, with ``after``, means over x_1, …, x_L, so that the
last token is seen too, which costs a step up to the highest layer chosen. Legend: K layers chosen, H their width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.stepping import Stepper, Walk, sum_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trace(NamedTuple):
    """Numbers of every place, 0 behind a continuation's end, and mean states."""

    states: Float[Tensor, "B N K H"]
    log_p: Float[Tensor, "B N L"]
    entropy: Float[Tensor, "B N L"]
    log_rank: Float[Tensor, "B N L"]  # 0 is the likeliest token
    mask: Bool[Tensor, "B N L"]

    @classmethod
    def of_nothing(cls, B: int, N: int, L: int, layers: int, width: int, device: torch.device) -> "Trace":
        """Return the trace of continuations of no tokens."""
        blank = torch.zeros(B, N, L, dtype=sum_dtype(device), device=device)
        return cls(blank.new_zeros(B, N, layers, width), blank, blank, blank, blank.bool())

    def of_layers(self, which: Sequence[int]) -> "Trace":
        """Return the same with some of the layers, by their place among those that were chosen."""
        return self._replace(states=self.states[:, :, list(which)])

    def padded(self, length: int) -> "Trace":
        """Return the same with numbers for ``length`` places, 0 behind those that there are."""
        missing = length - self.mask.shape[-1]
        return Trace(self.states, *(pad(numbers, (0, missing)) for numbers in self[1:]))

    @staticmethod
    def cat(parts: "Sequence[Trace]", dim: int) -> "Trace":
        """Join traces of other contexts (dim 0) or of more candidates (dim 1)."""
        return Trace(*(torch.cat(columns, dim) for columns in zip(*parts, strict=True)))


@runtime_checkable
class TracingLM(Protocol):
    """A language model that shows its insides, of given text and while it draws."""

    num_layers: int  # hidden states 0 (the embeddings) … num_layers (what the logits are made of)
    width: int

    def trace(self, x: Continuations, layers: Sequence[int], *, after: bool = False) -> Trace:
        """Return the trace of given continuations; ``after``: with the states after each token."""

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
        """Draw as ``sample`` does, and return the trace that ``trace`` would read from them.

        Given ``data``, continuations of the same contexts, the trace has theirs in front of the draws'.
        """


@runtime_checkable
class NetworkLM(TracingLM, Protocol):
    """A language model whose network can be copied."""

    model: "PreTrainedModel"


@final
class Recorder:
    """Builds a trace from a few places at a time, since the predictions of all places at once would fill the memory."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sum: Tensor | None = None

    def add(
        self,
        log_probs: Float[Tensor, "B N S V"],
        tokens: Int[Tensor, "B N S"],
        mask: Bool[Tensor, "B N S"],
    ) -> None:
        """Add S places: what was predicted there, and the tokens that came."""
        wide = sum_dtype(log_probs.device)
        log_p = log_probs.gather(-1, tokens.unsqueeze(-1))
        rank = 1 + (log_probs > log_p).sum(-1)
        entropy = -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(-1)  # finite, so that 0 · −inf is 0
        numbers = (log_p.squeeze(-1), entropy, rank.log())
        log_p, entropy, log_rank = (torch.where(mask, value.to(wide), 0) for value in numbers)
        self._rows.append((log_p, entropy, log_rank, mask))

    def add_states(self, states: Float[Tensor, "B N S K H"], mask: Bool[Tensor, "B N S"]) -> None:
        """Add states of S places, or of S tokens, where they are real."""
        total = torch.where(mask[..., None, None], states.to(sum_dtype(states.device)), 0).sum(2)
        self._sum = total if self._sum is None else self._sum + total

    def trace(self, length: int) -> Trace:
        """Return the trace of all places so far, padded to ``length``."""
        assert self._sum is not None, "a trace has at least one place"
        columns = (torch.cat(rows, dim=-1) for rows in zip(*self._rows, strict=True))
        log_p, entropy, log_rank, mask = (pad(column, (0, length - column.shape[-1])) for column in columns)
        places = mask.sum(-1).clamp(min=1)[..., None, None]
        return Trace(self._sum / places, log_p, entropy, log_rank, mask)


@runtime_checkable
class ShowingStepper(Stepper, Protocol):
    """A stepper whose last states can be seen: [B, 1, K, H] after ``first``, [B, N, K, H] after a step."""

    states: Tensor


def traced_ancestral(
    stepper: ShowingStepper,
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation,
    *,
    after: bool = False,
) -> tuple[Draws, Trace]:
    """Draw as ``ancestral`` does, and record the trace."""
    recorder, read = Recorder(), list[tuple[Tensor, Tensor]]()  # the last tokens, which have no state yet

    def see(mask: Tensor) -> None:
        recorder.add_states(stepper.states.expand(-1, num, -1, -1).unsqueeze(2), mask.unsqueeze(2))

    def record(log_p: Tensor, tokens: Tensor, is_running: Tensor) -> None:
        recorder.add(*(value.unsqueeze(2) for value in (log_p, tokens, is_running)))
        if not after:
            see(is_running)
        elif read:
            see(read.pop()[1])
        read.append((tokens, is_running))

    walk = Walk(stepper, contexts, num, space, rng, truncation)
    walk.record = record
    draws = walk.finish()
    if after:
        tokens, was_running = read.pop()
        stepper.step(tokens)
        see(was_running)
    return draws, recorder.trace(space.length)
