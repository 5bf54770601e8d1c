"""A bigram language model whose table is trained by gradient: the noise that learns, for small vocabularies.

P(x_t | x_{t−1}) = softmax(logits[x_{t−1}]),        x_0 = EOS
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.stepping import started

_LARGEST = 4096


@final
class BigramTable(nn.Module):
    """P(x | c) by one row of logits per token; plays ``LanguageModel`` and has gradients.

    >>> BigramTable(3, eos=0).log_prob(Continuations.from_lists([[]], [[[1, 0]]])).exp().round(decimals=4).tolist()
    [[0.1111]]
    """

    draws_here = True
    max_length = None

    def __init__(self, vocab_size: int, *, eos: int) -> None:
        super().__init__()
        if not 2 <= vocab_size <= _LARGEST:
            raise UserError(f"a table of {vocab_size} tokens is not for training: take 2 to {_LARGEST}")
        self.vocab_size, self.eos = vocab_size, eos
        self.logits = nn.Parameter(torch.zeros(vocab_size, vocab_size, dtype=torch.float64))

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P(x | c), with gradients."""
        before = torch.cat([self._last(x.contexts).view(-1, 1, 1).expand(*x.shape, 1), x.tokens[:, :, :-1]], dim=2)
        log_p = self.logits.log_softmax(1)[before, x.tokens]
        return (log_p * x.mask).sum(-1)

    @torch.no_grad()
    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """log P(v | c) for every token v."""
        return self.logits.log_softmax(1)[self._last(contexts)]

    @torch.no_grad()
    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` continuations of each context."""
        if truncation != ANCESTRAL:
            raise UserError("a bigram table draws from its own law: leave temperature, top_k and top_p out")
        B, rows, table = len(contexts), rng.rows(len(contexts), num, space.length), self.logits.log_softmax(1)
        before = self._last(contexts).unsqueeze(1).expand(B, num)
        tokens = torch.zeros(B, num, space.length, dtype=torch.long)
        for t in range(space.length):
            before = rows.categorical(table[before])
            tokens[:, :, t] = before
        lengths = space.lengths(tokens)
        tokens = tokens * (torch.arange(space.length) < lengths.unsqueeze(-1))
        x = Continuations(contexts, tokens, lengths)
        log_base = self.log_prob(x)
        return Draws(x, log_base, log_base)

    def _last(self, contexts: Sequences) -> Tensor:
        begun = started(contexts, self.eos)
        return begun.tokens.gather(1, (begun.lengths - 1).unsqueeze(1)).squeeze(1)
