"""Ancestral sampling, written once for every model that can be asked for one more token.

    x_t ~ q(· | c, x_<t),    log_base = Σ_t log P_LM(x_t | c, x_<t),    log_proposal = Σ_t log q(x_t | c, x_<t)

q is the truncation of P_LM. The sums, in float64, run over the tokens of x, EOS included.
"""

from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation

Record = Callable[[Tensor, Tensor, Tensor], None]  # takes log P [B, N, V], the tokens drawn [B, N], which still run
Next = tuple[Float[Tensor, "B V"], Float[Tensor, "B K H"]]  # log P of what comes next, and the states that say so


@runtime_checkable
class Stepper(Protocol):
    """A model in the middle of B × N continuations: it holds what it has read, and reads one more token of each."""

    def first(self) -> Float[Tensor, "B V"]:
        """Compute log P(v | c): one row per context, since all its candidates begin alike."""

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Append a token to each candidate; log P(v | c, x so far)."""

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n] of that context."""


@runtime_checkable
class SteppingLM(Protocol):
    """A language model that has a stepper of its own, faster than reading everything again."""

    def stepper(self, contexts: Sequences, num: int, length: int) -> Stepper:
        """Return a stepper at the start of ``num`` continuations of each context, of at most ``length`` tokens."""


def begin(lm: LanguageModel, contexts: Sequences, num: int, length: int) -> Stepper:
    """Return a stepper of any language model: its own, or one that reads whole strings by ``next_log_probs``."""
    if isinstance(lm, SteppingLM):
        return lm.stepper(contexts, num, length)
    readable = started(contexts, lm.eos)
    check_fits(readable, length, lm.max_length)

    def read(strings: Sequences) -> Next:
        log_p = lm.next_log_probs(strings)
        return log_p, log_p.new_zeros(len(strings), 0, 0)

    return PlainStepper(read, readable, num)


@final
class PlainStepper:
    """Reads the whole string again for every token: for models that share nothing."""

    def __init__(self, read: Callable[[Sequences], Next], contexts: Sequences, num: int) -> None:
        self.read, self.contexts = read, contexts
        self.tokens = contexts.tokens.new_zeros(len(contexts), num, 0)
        self.log_first, states = read(contexts)
        self.states = states.unsqueeze(1)

    def first(self) -> Float[Tensor, "B V"]:
        """Compute log P of the first token."""
        return self.log_first

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Read a token of each candidate."""
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(-1)], dim=-1)
        lengths = torch.full_like(tokens, self.tokens.shape[2])
        whole = Continuations(self.contexts, self.tokens, lengths).joined()
        log_p, states = self.read(whole.trimmed())
        self.states = states.unflatten(0, tokens.shape)
        return log_p.view(*tokens.shape, -1)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Exchange what was read."""
        self.tokens, self.states = exchanged(self.tokens, rows), exchanged(self.states, rows)


def exchanged(values: Shaped[Tensor, "B _ *more"], rows: Int[Tensor, "B N"]) -> Shaped[Tensor, "B _ *more"]:
    """Return values[b, rows[b, n]]; what all candidates of a context still share, [B, 1], stays as it is."""
    if values.shape[1] == 1:
        return values
    return values[torch.arange(len(rows), device=rows.device).unsqueeze(1), rows]


@final
class Walk:
    """B × N continuations on their way, each token from q."""

    def __init__(
        self, stepper: Stepper, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation
    ) -> None:
        B = len(contexts)
        self._stepper, self._space, self._truncation = stepper, space, truncation
        self._rows = rng.rows(B, num, space.length)
        self._log_p = stepper.first().unsqueeze(1).expand(B, num, -1)
        device = self._log_p.device
        self._contexts, self._length = contexts.to(device), 0
        self._tokens = torch.zeros(B, num, space.length, dtype=torch.long, device=device)
        self._last = self._tokens[:, :, 0]
        self._running = torch.ones(B, num, dtype=torch.bool, device=device)
        self.log_base = torch.zeros(B, num, dtype=sum_dtype(device), device=device)
        self.log_proposal = torch.zeros_like(self.log_base)
        self.record: Record | None = None  # sees every token that is drawn

    def go_to(self, length: int) -> None:
        """Draw until every continuation has ``length`` tokens, or has ended."""
        for t in range(self._length, length):
            if not self._running.any():
                break
            if t:
                self._log_p = self._stepper.step(self._last)
            log_q = self._truncation(self._log_p)
            self._last = chosen = self._rows.categorical(log_q)
            if self.record is not None:
                self.record(self._log_p, chosen, self._running)
            self._tokens[:, :, t] = chosen * self._running
            self.log_base += _picked(self._log_p, chosen) * self._running
            self.log_proposal += _picked(log_q, chosen) * self._running
            if self._space.eos is not None:
                self._running = self._running & (chosen != self._space.eos)
        self._length = length

    def finish(self) -> Draws:
        """Draw what is left."""
        self.go_to(self._space.length)
        return Draws(self.x, self.log_base, self.log_proposal)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n]; it continues with its own randomness."""
        rows = rows.to(self._tokens.device)
        self._stepper.select(rows)
        for name in ("_tokens", "_last", "_running", "log_base", "log_proposal"):
            setattr(self, name, exchanged(getattr(self, name), rows))

    @property
    def x(self) -> Continuations:
        """Return the continuations so far."""
        tokens = self._tokens[:, :, : self._length]
        return Continuations(self._contexts, tokens, self._space.lengths(tokens))


def ancestral(
    stepper: Stepper, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation
) -> Draws:
    """Draw ``num`` continuations of each context, token by token."""
    return Walk(stepper, contexts, num, space, rng, truncation).finish()


def in_chunks(
    read: Callable[[slice], Callable[[int], Any]],
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation,
    *,
    rows: int,
    most_contexts: int | None = None,
    draw: Callable[..., Draws] = ancestral,
) -> Draws:
    """Sample ancestrally with at most ``rows`` continuations, of at most ``most_contexts`` contexts, at once.

    ``read(contexts)`` reads some contexts once and returns what makes a stepper for a number of their candidates, or
    what ``draw`` takes in its place; ``draw`` samples with it as ``ancestral`` does. The size of the chunks changes
    nothing but memory.
    """
    if num < 1 or len(contexts) < 1:
        raise UserError(f"{num} continuations of {len(contexts)} contexts were asked for: ask for at least one of each")
    per_chunk = max(1, min(rows // num, most_contexts or len(contexts)))
    chunks = []
    for b in range(0, len(contexts), per_chunk):
        some = slice(b, b + per_chunk)
        make = read(some)
        size = _alike(num, rows)
        counts = [(n, min(size, num - n)) for n in range(0, num, size)]
        parts = [
            draw(make(k), contexts[some], k, space, rng.shift(contexts=b, candidates=n), truncation) for n, k in counts
        ]
        chunks.append(Draws.cat(parts, dim=1))
    return Draws.cat(chunks, dim=0)


def _alike(num: int, max_rows: int) -> int:
    """Split ``num`` into as few parts as ``max_rows`` allows, of about equal size: a small rest would be slow."""
    parts = -(-num // max_rows)
    return min(max_rows, -(-num // (64 * parts)) * 64)  # in blocks of the compiled steps


def _picked(log_probs: Tensor, chosen: Tensor) -> Tensor:
    return log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def sum_tokens(values: Float[Tensor, "*rows L"], mask: Bool[Tensor, "*rows L"]) -> Float[Tensor, "*rows"]:
    """Sum over real tokens, in float64: forty float32 additions would cost the fourth decimal."""
    return torch.where(mask, values, 0).sum(-1, dtype=sum_dtype(values.device))


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def started(contexts: Sequences, eos: int) -> Sequences:
    """Return contexts with the empty ones replaced by [EOS]: an empty context is the start of a document."""
    if len(contexts) == 0 or int(contexts.lengths.min()) > 0:
        return contexts
    tokens = torch.nn.functional.pad(contexts.tokens, (0, int(contexts.tokens.shape[1] == 0)))
    first = torch.where(contexts.lengths == 0, eos, tokens[:, 0])
    return Sequences(torch.cat([first.unsqueeze(1), tokens[:, 1:]], dim=1), contexts.lengths.clamp(min=1))


def check_fits(contexts: Sequences, length: int, max_length: int | None) -> None:
    """Refuse a context that leaves no room for the continuation."""
    longest = int(contexts.lengths.max()) if len(contexts) else 0
    if max_length is not None and longest + length > max_length:
        room = max_length - length
        remedy = f"shorten the prefix to {room} tokens" if room > 0 else "ask for a shorter continuation"
        raise UserError(
            f"a prefix of {longest} tokens and a continuation of {length} do not fit the model's context of "
            f"{max_length} tokens: {remedy}"
        )
