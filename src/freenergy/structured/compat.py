"""A drop-in for pytorch-crf: the same constructor, parameters, calls and errors, with what was asked for on top.

    from freenergy.structured.compat import CRF        # instead of: from torchcrf import CRF

    crf(emissions, tags, mask) = log p(tags | emissions),        crf.decode(emissions, mask) = the best tags, as lists

Differences, all on purpose: a mask may have holes anywhere and rows may be empty (masked positions do not exist),
forbidden transitions are booleans and give finite gradients, sums are in float32 at least, and there are ``marginals``,
``top_k``, ``sample`` and ``distribution`` besides.
"""

from typing import final

import torch
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured.allowed import Allowed
from freenergy.structured.chain import LinearChain
from freenergy.structured.distribution import NO_LABEL, Taggings

REDUCTIONS = ("none", "sum", "mean", "token_mean")


@final
class CRF(nn.Module):
    """The parameters of a linear chain: ``transitions``, ``start_transitions``, ``end_transitions``.

    Tensors are [T, B, …] unless ``batch_first``. ``allowed`` holds hard constraints, such as ``bio(labels)``.

    >>> crf = CRF(3, batch_first=True)
    >>> crf(torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.long)).shape
    torch.Size([])
    >>> crf.decode(torch.eye(3).unsqueeze(0) * 9)
    [[0, 1, 2]]
    """

    def __init__(self, num_tags: int, batch_first: bool = False, *, allowed: Allowed | None = None) -> None:
        if num_tags <= 0:
            raise UserError(f"invalid number of tags: {num_tags}: set it to 1 or more")
        super().__init__()
        self.num_tags, self.batch_first, self.allowed = num_tags, batch_first, allowed
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from [−0.1, 0.1], from torch's own generator as pytorch-crf does."""
        for parameter in (self.start_transitions, self.end_transitions, self.transitions):
            nn.init.uniform_(parameter, -0.1, 0.1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_tags={self.num_tags})"

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum") -> Tensor:
        """Return log p(tags), which is negative: the loss is its negative."""
        if reduction not in REDUCTIONS:
            raise UserError(f"invalid reduction: {reduction}: choose none, sum, mean or token_mean")
        self._check(emissions, mask, tags)
        chain = self.distribution(emissions, mask)
        log_p = chain.log_prob(self._by_row(tags))
        if reduction == "none":
            return log_p
        if reduction == "token_mean":
            return log_p.sum() / chain.lengths.sum()
        return log_p.sum() if reduction == "sum" else log_p.mean()

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """Return the best tags of each sequence; nothing for masked positions."""
        return [[k for k in row if k != NO_LABEL] for row in self.best(emissions, mask).labels.tolist()]

    def best(self, emissions: Tensor, mask: Tensor | None = None) -> Taggings:
        """Return the best tags as a tensor [B, T], −1 at masked positions, with their scores [B]."""
        return self.distribution(emissions, mask).argmax()

    def top_k(self, emissions: Tensor, k: int, mask: Tensor | None = None) -> Taggings:
        """Return the k best taggings of each sequence."""
        return self.distribution(emissions, mask).top_k(k)

    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return p(tag of position t is k), in the layout of the emissions."""
        return self._by_row(self.distribution(emissions, mask).marginals())

    def sample(self, emissions: Tensor, num: int, rng: Rng, mask: Tensor | None = None) -> Tensor:
        """Draw taggings [B, num, T]."""
        return self.distribution(emissions, mask).sample(num, rng)

    def distribution(self, emissions: Tensor, mask: Tensor | None = None) -> LinearChain:
        """Return p(tags | emissions) with all its methods."""
        self._check(emissions, mask)
        return LinearChain(
            self._by_row(emissions),
            self.transitions,
            start=self.start_transitions,
            end=self.end_transitions,
            mask=None if mask is None else self._by_row(mask),
            allowed=self.allowed,
        )

    def _by_row(self, values: Tensor) -> Tensor:
        return values if self.batch_first else values.transpose(0, 1)

    def _check(self, emissions: Tensor, mask: Tensor | None, tags: Tensor | None = None) -> None:
        if emissions.dim() != 3:
            raise UserError(f"emissions must have dimension of 3, got {emissions.dim()}")
        if emissions.shape[2] != self.num_tags:
            raise UserError(f"expected last dimension of emissions is {self.num_tags}, got {emissions.shape[2]}")
        for name, values in (("tags", tags), ("mask", mask)):
            if values is not None and values.shape != emissions.shape[:2]:
                shapes = f"{tuple(emissions.shape[:2])} and {tuple(values.shape)}"
                raise UserError(f"the first two dimensions of emissions and {name} must match, got {shapes}")
