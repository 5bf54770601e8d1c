"""Continuations whose tokens are real-valued: the sibling of ``Continuations`` that gradients can reach.

    embedding of place t = Σ_v p_t(v) · table[v],      p_t one-hot: the hard token

Contexts stay tokens. Each place of a continuation holds an embedding, probabilities over the vocabulary, or logits
whose softmax is taken. Legend: as in ``sequences``; D is the width of a place, V or the width of an embedding.
"""

from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations, Sequences


@final
@dataclass(frozen=True, slots=True)
class Soft:
    """B contexts and N real-valued continuations of each.

    >>> x = Continuations.from_lists([[1]], [[[2, 0], [3]]])
    >>> Soft.one_hot(x, vocab_size=4).values[0, 0].tolist()
    [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """

    contexts: Sequences
    values: Float[Tensor, "batch num length D"]
    lengths: Int[Tensor, "batch num"]
    form: Literal["probabilities", "logits", "embeddings"] = "probabilities"

    @classmethod
    def one_hot(cls, x: Continuations, vocab_size: int, dtype: torch.dtype = torch.float32) -> "Soft":
        """Returns hard tokens as probabilities of 0 and 1."""
        return cls(x.contexts, torch.nn.functional.one_hot(x.tokens, vocab_size).to(dtype), x.lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N), the shape of everything that is computed from this."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def mask(self) -> Bool[Tensor, "batch num length"]:
        """True at real places of the continuations."""
        return torch.arange(self.values.shape[2], device=self.lengths.device) < self.lengths.unsqueeze(-1)

    def embedded(self, table: Float[Tensor, "V H"]) -> Float[Tensor, "batch num length H"]:
        """Returns the embedding of each place, by a network's table of embeddings."""
        wanted = table.shape[1] if self.form == "embeddings" else table.shape[0]
        if self.values.shape[-1] != wanted:
            raise UserError(
                f"soft tokens have {self.values.shape[-1]} numbers per place, but as {self.form} this network reads "
                f"{wanted}: give its own vocabulary, or embeddings of its width"
            )
        if self.form == "embeddings":
            return self.values
        probabilities = self.values.softmax(-1) if self.form == "logits" else self.values
        return probabilities.to(table.dtype) @ table

    def to(self, device: torch.device | str) -> "Soft":
        """The same on another device."""
        moved = self.values.to(device), self.lengths.to(device)
        return replace(self, contexts=self.contexts.to(device), values=moved[0], lengths=moved[1])
