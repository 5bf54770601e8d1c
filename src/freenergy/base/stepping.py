"""Ancestral sampling, written once for every model that can be asked for one more token.

    x_t ~ q(· | c, x_<t),    log_base = Σ_t log P_LM(x_t | c, x_<t),    log_proposal = Σ_t log q(x_t | c, x_<t)

where q is the truncation of P_LM.

The sum runs over the tokens of x, EOS included; what is drawn after EOS is thrown away. Sums are float64.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.errors import UserError
from freenergy.protocols import Draws, Truncation
from freenergy.randomness import Rng
from freenergy.sequences import Continuations, Sequences, SequenceSpace


@runtime_checkable
class Stepper(Protocol):
    """A model in the middle of B × N continuations: it holds what it has read, and reads one more token of each."""

    def first(self) -> Float[Tensor, "B V"]:
        """log P(v | c): one row a context, since all its candidates begin alike."""
        ...

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Append a token to each candidate; log P(v | c, x so far)."""
        ...


def ancestral(
    stepper: Stepper, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation
) -> Draws:
    """Draw ``num`` continuations of each context, token by token."""
    B = len(contexts)
    rows = rng.rows(B, num, space.length)
    log_p = stepper.first().unsqueeze(1).expand(B, num, -1)
    tokens = torch.zeros(B, num, space.length, dtype=torch.long, device=log_p.device)
    log_base = torch.zeros(B, num, dtype=sum_dtype(log_p.device), device=log_p.device)
    log_proposal = torch.zeros_like(log_base)
    running = torch.ones(B, num, dtype=torch.bool, device=log_p.device)
    for t in range(space.length):
        log_q = truncation(log_p)
        chosen = rows.categorical(log_q)
        tokens[:, :, t] = chosen * running
        log_base += _picked(log_p, chosen) * running
        log_proposal += _picked(log_q, chosen) * running
        if space.eos is not None:
            running = running & (chosen != space.eos)
        if t + 1 == space.length or not running.any():
            break
        log_p = stepper.step(chosen)
    lengths = space.lengths(tokens)
    return Draws(Continuations(contexts.to(log_p.device), tokens, lengths), log_base, log_proposal)


def in_chunks(
    read: Callable[[slice], Callable[[int], Stepper]],
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation,
    *,
    rows: int,
    draw: Callable[..., Draws] = ancestral,
) -> Draws:
    """Ancestral sampling with at most ``rows`` continuations at once.

    ``read(contexts)`` reads some contexts once and returns what makes a stepper for a number of their candidates;
    ``draw`` samples with it as ``ancestral`` does, and may look on.
    Candidates own their randomness, so the size of the chunks changes nothing but memory.
    """
    if num < 1 or len(contexts) < 1:
        raise UserError(f"{num} continuations of {len(contexts)} contexts were asked for: ask for at least one of each")
    per_chunk = max(1, rows // num)
    chunks = []
    for b in range(0, len(contexts), per_chunk):
        some = slice(b, b + per_chunk)
        make = read(some)
        counts = [(n, min(rows, num - n)) for n in range(0, num, rows)]
        parts = [
            draw(make(k), contexts[some], k, space, rng.shift(contexts=b, candidates=n), truncation) for n, k in counts
        ]
        chunks.append(Draws.cat(parts, dim=1))
    return Draws.cat(chunks, dim=0)


def _picked(log_probs: Tensor, chosen: Tensor) -> Tensor:
    return log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def sum_tokens(values: Float[Tensor, "*rows L"], mask: Bool[Tensor, "*rows L"]) -> Float[Tensor, "*rows"]:
    """Sum over real tokens, in float64: forty float32 additions would cost the fourth decimal."""
    return torch.where(mask, values, 0).sum(-1, dtype=sum_dtype(values.device))


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def started(contexts: Sequences, eos: int) -> Sequences:
    """Contexts with the empty ones replaced by [EOS]: an empty context is the start of a document."""
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
