"""A language model that is a table: the oracle of the tests and the model of the first example.

    P_LM(x | c) = Π_t table[x_{t−k}, …, x_{t−1}][x_t]

Order k, V tokens, V^k rows; before the first token the history is filled with EOS.
"""

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.stepping import exchanged, in_chunks, sum_tokens

_ROWS = 4096


@final
class TabularLM:
    """P(x_t | the last k tokens) from a table of logits.

    >>> lm = TabularLM(torch.zeros(1, 4), eos=0)  # order 0: every token is equally likely
    >>> lm.next_log_probs(Sequences.from_lists([[1, 2]])).exp().tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """

    draws_here = True

    def __init__(self, logits: Float[Tensor, "histories V"], *, eos: int) -> None:
        self.vocab_size, self.eos, self.max_length, self.order = logits.shape[1], eos, None, 0
        while self.vocab_size**self.order < logits.shape[0]:
            self.order += 1
        if self.vocab_size**self.order != logits.shape[0] or not 0 <= eos < self.vocab_size:
            raise UserError(
                f"a table of {logits.shape[0]} rows over {self.vocab_size} tokens, EOS {eos}, is not a language model: "
                f"give {self.vocab_size}**k rows for order k, and an EOS below {self.vocab_size}"
            )
        self.table = logits.log_softmax(-1)

    @classmethod
    def random(cls, rng: Rng, *, vocab_size: int, order: int, eos: int = 0, spread: float = 1.0) -> "TabularLM":
        """Return a table with normal logits of the given spread, float64."""
        return cls(spread * rng.normal(vocab_size**order, vocab_size), eos=eos)

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c)."""
        B, N, L = x.tokens.shape
        if not L:
            return torch.zeros(B, N, dtype=self.table.dtype)
        history = self._history(x.contexts).unsqueeze(1).expand(B, N, self.order)
        tokens = torch.cat([history, x.tokens], dim=-1)
        windows = torch.stack([tokens[..., t : t + self.order] for t in range(L)], dim=-2)  # [B, N, L, k]
        log_p = self.table[self._row(windows)]
        return sum_tokens(log_p.gather(-1, x.tokens.unsqueeze(-1)).squeeze(-1), x.mask)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P_LM(v | c) for every token v."""
        return self.table[self._row(self._history(contexts))]

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context."""

        def read(some: slice) -> Callable[[int], _TableStepper]:
            return partial(_TableStepper, self, contexts[some])

        return in_chunks(read, contexts, num, space, rng, truncation, rows=_ROWS)

    def stepper(self, contexts: Sequences, num: int, length: int) -> "_TableStepper":
        """Return a stepper at the start of ``num`` continuations of each context."""
        return _TableStepper(self, contexts, num)

    def _history(self, contexts: Sequences) -> Int[Tensor, "B k"]:
        """Return the last k tokens of each context, EOS before the first."""
        rows = [([self.eos] * self.order + row)[len(row) :] for row in contexts.lists()]
        return torch.tensor(rows, dtype=torch.long).view(len(contexts), self.order)

    def _row(self, history: Int[Tensor, "*rows k"]) -> Int[Tensor, "*rows"]:
        powers = self.vocab_size ** torch.arange(self.order - 1, -1, -1)
        return (history * powers).sum(-1)


@final
class _TableStepper:
    def __init__(self, lm: TabularLM, contexts: Sequences, num: int) -> None:
        self.lm = lm
        self.history = lm._history(contexts).unsqueeze(1).expand(len(contexts), num, lm.order)

    def first(self) -> Float[Tensor, "B V"]:
        return self.lm.table[self.lm._row(self.history[:, 0])]

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        kept = self.history[..., 1:] if self.lm.order else self.history
        self.history = torch.cat([kept, tokens.unsqueeze(-1)], dim=-1)[..., : self.lm.order]
        return self.lm.table[self.lm._row(self.history)]

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        self.history = exchanged(self.history, rows)
