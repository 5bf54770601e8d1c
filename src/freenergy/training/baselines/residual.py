"""A language model corrected place by place, and normalised there.

    log P(v | h) = log P_LM(v | h) + f(v | h) − log Σ_u P_LM(u | h) · exp f(u | h)

h is all that was read before: the context and x_<t. Unlike an energy, f is paid for at every place with a sum over the
vocabulary, so P is exact and needs no Z; and unlike an energy, it never sees the whole of x. Several corrections are
applied in turn, each to the law that the last one left. With f = 0 it is P_LM.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation, normalised
from freenergy.lm.activations import NetworkLM
from freenergy.lm.network_steps import log_softmax
from freenergy.lm.stepping import PlainStepper, check_fits, in_chunks, started, sum_dtype, sum_tokens
from freenergy.training.baselines.reading import NUMBERS, NetworkReader, Places, PlainReader, picked_in_parts, targets

_ROWS = 64  # whole strings whose states are held at once


@final
class ResidualLM:
    """P_LM and its corrections.

    A correction is a module: ``correction(rows, reading)`` reads whole strings, with what the base has read of them at
    hand, and returns f as a function of places and of log P there. It samples by reading every string again for each
    token, which is exact and slow.
    """

    draws_here = True

    def __init__(self, base: LanguageModel, corrections: Sequence[nn.Module], *, layers: tuple[int, ...] = ()) -> None:
        self.base, self.corrections = base, list(corrections)
        self.vocab_size, self.eos, self.max_length = base.vocab_size, base.eos, base.max_length
        self.device = base.model.device if isinstance(base, NetworkLM) else torch.device("cpu")
        self._reader = NetworkReader(base.model, layers) if isinstance(base, NetworkLM) else PlainReader(base)
        self.places_at_once = max(1, NUMBERS // self.vocab_size)

    def read(self, rows: Sequences) -> Callable[[Places], Float[Tensor, "m V"]]:
        """Read whole strings once; what is returned gives log P(v | h) at any of their places."""
        reading = self._reader.read(rows)
        scorers = [correction(rows, reading) for correction in self.corrections]

        def log_probs(at: Places) -> Tensor:
            log_p = log_softmax(reading.scores(at))
            for f in scorers:
                log_p = normalised(log_p + f(at, log_p))
            return log_p

        return log_probs

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P(x | c)."""
        x = Continuations(started(x.contexts, self.eos), x.tokens, x.lengths).trimmed().to(self.device)
        B, N, L = x.tokens.shape
        if not B or not N or not L:
            return torch.zeros(B, N, dtype=sum_dtype(self.device), device=self.device)
        check_fits(x.contexts, L, self.max_length)
        per_chunk = max(1, _ROWS // N)
        chunks = [x[b : b + per_chunk] for b in range(0, B, per_chunk)]
        return torch.cat([self._log_prob_of_some(chunk) for chunk in chunks])

    def _log_prob_of_some(self, x: Continuations) -> Float[Tensor, "B N"]:
        parts = [x.candidates(slice(n, n + _ROWS)) for n in range(0, x.shape[1], _ROWS)]
        return torch.cat([self._log_prob(part) for part in parts], dim=1)

    def _log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        rows, at, tokens, number = targets(x)
        values = torch.zeros(x.tokens.numel(), dtype=sum_dtype(self.device), device=self.device)
        if len(at):
            values[number] = picked_in_parts(self.read(rows), at, tokens, self.places_at_once).to(values)
        return sum_tokens(values.view(x.tokens.shape), x.mask)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """log P(v | c) for every token v."""
        contexts = started(contexts, self.eos).trimmed().to(self.device)
        check_fits(contexts, 0, self.max_length)
        size = min(_ROWS, self.places_at_once)
        return torch.cat([self._next(contexts[b : b + size]) for b in range(0, len(contexts), size)])

    def _next(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        row = torch.arange(len(contexts), device=self.device)
        return self.read(contexts)(Places(row, contexts.lengths - 1))

    @torch.no_grad()
    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """``num`` independent continuations of each context."""
        contexts = contexts.to(self.device)
        readable = started(contexts, self.eos).trimmed()
        check_fits(readable, space.length, self.max_length)

        def next_and_no_states(some: Sequences) -> tuple[Tensor, Tensor]:
            return self.next_log_probs(some), torch.zeros(len(some), 0, 0, device=self.device)

        def read(part: slice) -> Callable[[int], PlainStepper]:
            return lambda count: PlainStepper(next_and_no_states, readable[part], count)

        return in_chunks(read, contexts, num, space, rng, truncation, rows=self.places_at_once)
