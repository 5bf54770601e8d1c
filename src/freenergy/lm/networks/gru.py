"""A small recurrent network: gated recurrent units over embeddings, for texts of a few tokens.

    h_t = GRU(e(x_{t−1}), h_{t−1}),      f(· ; x_<t) = W h_t + b,      x_0 = a start token of its own

Drawing costs one cell per token, so that objectives which draw at every step (E-ARM) stay cheap.
"""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import inference


@final
class GRUModule(nn.Module):
    """The weights: embeddings, one layer of gated recurrent units, an output layer; dropout before and after."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size + 1, width)  # the last row is the start
        self.cell = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab_size)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, read: Int[Tensor, "rows T"], state: Float[Tensor, "1 rows d"] | None = None
    ) -> tuple[Float[Tensor, "rows T V"], Float[Tensor, "1 rows d"]]:
        """Returns the logits after each token, and the last state."""
        states, last = self.cell(self.drop(self.embed(read)), state)
        return self.out(self.drop(states)), last


@final
class GRUNetwork:
    """q(x) = Π_t softmax(f(· ; x_<t))[x_t]; nothing is given, and all tokens of a row count."""

    def __init__(self, vocab_size: int, *, width: int, dropout: float, rng: Rng) -> None:
        self.vocab_size = vocab_size
        with torch.random.fork_rng():
            torch.manual_seed(rng.integer())
            self.module = GRUModule(vocab_size, width, dropout)

    def logits(self, given: None, tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Returns the logits of each token, by what comes before it."""
        found: Tensor = self.module(torch.cat([self._start(tokens), tokens[:, :-1]], dim=1).to(self._device))[0]
        return found

    @torch.no_grad()
    def draw(
        self, given: None, known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draws ``length`` tokens after the known ones."""
        with inference(self.module):
            read, state, drawn = torch.cat([self._start(known), known], dim=1).to(self._device), None, list[Tensor]()
            for k in range(length):
                logits, state = self.module(read, state)
                read = rng.child("token", k).categorical(logits[:, -1]).unsqueeze(1)
                drawn.append(read)
        tokens = torch.cat(drawn, dim=1).to(known.device)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    @property
    def _device(self) -> torch.device:
        return self.module.out.weight.device

    def _start(self, tokens: Int[Tensor, "rows T"]) -> Int[Tensor, "rows 1"]:
        return torch.full((len(tokens), 1), self.vocab_size, device=tokens.device)
