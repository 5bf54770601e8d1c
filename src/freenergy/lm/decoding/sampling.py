"""Ancestral sampling with a fast stepper: ``stepping.ancestral`` without an array of log-probabilities.

    x_t ~ q(· | c, x_<t),    log_base = Σ_t log P_LM(x_t | c, x_<t),    log_proposal = Σ_t log q(x_t | c, x_<t)

Logits exist for some rows at a time, are drawn from and forgotten, so memory does not grow with N × V. The same ``Rng``
gives the same continuations as ``ancestral``, up to rounding where a number falls between two tokens.
"""

from functools import partial
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.activations import Trace
from freenergy.lm.decoding import drawing
from freenergy.lm.decoding.fused import Fused
from freenergy.lm.decoding.load import FastStepper

_LOGITS = 2**23  # numbers of logits held at once: 32 MB in float32


def sample(
    stepper: FastStepper, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation
) -> Draws:
    """Draw ``num`` continuations of each context, as ``ancestral`` does."""
    return _Walk(stepper, contexts, num, space, rng, truncation, is_traced=False).finish()


def sample_traced(
    stepper: FastStepper,
    contexts: Sequences,
    num: int,
    space: SequenceSpace,
    rng: Rng,
    truncation: Truncation,
    *,
    after: bool = False,
) -> tuple[Draws, Trace]:
    """Return the same draws, and the trace of the layers that the stepper shows."""
    walk = _Walk(stepper, contexts, num, space, rng, truncation, is_traced=True, after=after)
    return walk.finish(), walk.trace()


@final
class _Walk:
    """B × N continuations on their way."""

    def __init__(
        self,
        stepper: FastStepper,
        contexts: Sequences,
        num: int,
        space: SequenceSpace,
        rng: Rng,
        truncation: Truncation,
        *,
        is_traced: bool,
        after: bool = False,
    ) -> None:
        B, L, device = len(contexts), space.length, stepper.network.device
        self._stepper, self._space, self._truncation, self._is_traced = stepper, space, truncation, is_traced
        self._rows = rng.rows(B, num, L)
        self._contexts = contexts.to(device)
        self._tokens = torch.zeros(B, num, L, dtype=torch.long, device=device)
        self._numbers = torch.zeros(4, B, num, L, dtype=torch.float64, device=device)  # log P, log q, entropy, log rank
        self._mask = torch.zeros(B, num, L, dtype=torch.bool, device=device)
        self._room: Tensor | None = None  # for logits
        self._states: Tensor | None = None  # Σ over places, or over tokens with ``after``
        self._after = after

    @torch.no_grad()
    def finish(self) -> Draws:
        running = torch.ones(self._tokens.shape[:2], dtype=torch.bool, device=self._tokens.device)
        hidden, last, was_running = None, self._tokens[:, :, 0], running
        for t in range(self._space.length):
            if not bool(running.any()):
                break
            if t:
                hidden = self._stepper.advance(last)
                if self._after:
                    self._see(was_running)
            last = self._draw(t, hidden)
            self._mask[:, :, t] = running
            self._tokens[:, :, t] = last * running
            self._numbers[..., t] *= running
            if self._is_traced and not self._after:
                self._see(running)
            was_running = running
            if self._space.eos is not None:
                running = running & (last != self._space.eos)
        if self._after:
            self._stepper.end(last)
            self._see(was_running)
        log_base, log_proposal = self._numbers[:2].sum(-1)
        x = Continuations(self._contexts, self._tokens, self._space.lengths(self._tokens))
        return Draws(x, log_base, log_proposal)

    def _see(self, is_real: Tensor) -> None:
        """Add the stepper's states to the sum, where they are of real tokens."""
        states = self._stepper.states.double() * is_real[..., None, None]
        self._states = states if self._states is None else self._states + states

    def trace(self) -> Trace:
        assert self._states is not None, "a trace has at least one place"
        places = self._mask.sum(-1).clamp(min=1)[..., None, None]
        log_p, _, entropy, log_rank = self._numbers
        return Trace(self._states / places, log_p, entropy, log_rank, self._mask)

    def _draw(self, t: int, hidden: Tensor | None) -> Int[Tensor, "B N"]:
        """Draw a token for each candidate; the numbers of a trace go to column t."""
        (B, N, _), V = self._tokens.shape, self._stepper.log_first.shape[1]
        numbers = self._rows.numbers(t)
        u = None if numbers is None else numbers.flatten()
        kernels, head, edit = self._stepper.kernels, self._stepper.network.head, self._stepper.edit
        is_plain = self._truncation.is_identity and edit is None
        if u is not None and hidden is not None and is_plain and isinstance(kernels, Fused):
            return self._keep(t, [kernels.draw(hidden, head, u.view(B, N), self._is_traced)])
        if hidden is not None:
            hidden = self._stepper.rows(hidden)
        parts_of = 1 if u is None else -(-B * N * V // _LOGITS)
        size = -(-B * N // min(parts_of, B * N))  # parts as large as each other
        if self._room is None:
            self._room = drawing.room_for(min(size, B * N), V, self._stepper.log_first)
        parts = []
        for r in range(0, B * N, size):
            rows = slice(r, min(r + size, B * N))
            logits = self._room[: rows.stop - r]
            self._write_logits(hidden, rows, logits[:, :V])
            logits[:, V:] = drawing.NOTHING
            if hidden is not None and edit is not None:
                edit.apply(logits, rows)
            by_rows = partial(drawing.by_rows, self._rows, (B, N))
            pick = by_rows if u is None else partial(drawing.by_uniform, u[rows].to(logits.device))
            parts.append(drawing.draw(logits, self._truncation, pick, self._is_traced))
        return self._keep(t, parts)

    def _keep(self, t: int, parts: list[drawing.DrawnTokens]) -> Int[Tensor, "B N"]:
        B, N, _ = self._tokens.shape
        for column, name in enumerate(("log_base", "log_proposal", "entropy", "log_rank")):
            values = [getattr(part, name) for part in parts]
            if values[0] is not None:
                self._numbers[column, :, :, t] = torch.cat(values).view(B, N)
        return torch.cat([part.tokens for part in parts]).view(B, N)

    def _write_logits(self, hidden: Float[Tensor, "R E"] | None, rows: slice, out: Float[Tensor, "some V"]) -> None:
        """Return logits of some rows, or log P of the first token, where nothing was read but the contexts."""
        if hidden is None:
            N = self._tokens.shape[1]
            out.copy_(self._stepper.log_first[torch.arange(rows.start, rows.stop, device=out.device) // N])
        else:
            self._stepper.network.head.write(hidden[rows], out)
