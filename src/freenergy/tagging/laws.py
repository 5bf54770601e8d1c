"""Laws of tags given words that have no history beyond the last tag, as distributions with one face.

    softmax   p(y | x) = Π_t softmax(e_t)(y_t)
    memm      p(y | x) = Π_t softmax(e_t + A(y_{t−1}, ·))(y_t)
    crf       p(y | x) = exp(Σ_t e_t(y_t) + Σ_t A(y_{t−1}, y_t)) / Z(x)

All three are linear chains: the first without transitions, the second with transitions of each step that sum to one, so
that Z = 1. So all sums are those of ``structured.LinearChain``; the first two have log p(y | x) without such a sum.

Legend: B sentences, T words, K tags; e_t are emissions [B, T, K].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.structured import Allowed, LinearChain, Taggings, bio, bioes
from freenergy.tagging.spans import Scheme


@runtime_checkable
class TagLaw(Protocol):
    """A distribution of taggings [B, T] of a batch of sentences."""

    @property
    def is_exact(self) -> bool:
        """Returns whether ``log_prob`` sums to one; else it is an upper bound, with a lower bound of log Z."""

    def log_prob(self, y: Int[Tensor, "B T"]) -> Float[Tensor, " B"]:
        """Returns log p(y | x) of each sentence."""

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Returns the log-probability that each tag is one of its set."""

    def log_score(self, y: Int[Tensor, "B num T"]) -> Float[Tensor, "B num"]:
        """Returns the unnormalised log-probability of some taggings."""

    def argmax(self) -> Taggings:
        """Returns the best tagging."""

    def top_k(self, k: int) -> Taggings:
        """Returns the k best taggings."""

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Returns p(y_t = k | x)."""

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draws taggings."""


def constraints(names: Sequence[str], scheme: Scheme) -> Allowed | None:
    """Returns what a scheme of spans allows."""
    return None if scheme == "none" else bio(names) if scheme == "bio" else bioes(names)


def mask_of(lengths: Int[Tensor, " B"], T: int) -> Bool[Tensor, "B T"]:
    """Returns which places have words."""
    return torch.arange(T, device=lengths.device) < lengths.unsqueeze(1)


@final
@dataclass(frozen=True, slots=True)
class ChainLaw:
    """A chain; where ``local`` is given, these are log-probabilities of each step, and Z = 1 (``memm``, ``softmax``).

    ``decoding`` is the chain that search uses: the same, or one in which the scheme's constraints hold.
    """

    chain: LinearChain
    decoding: LinearChain
    lengths: Int[Tensor, " B"]
    local: Tensor | None = None  # [B, T, K], or [B, T, K, K] after each tag; entry 0 of the second is after the start
    is_exact: bool = True

    def log_prob(self, y: Int[Tensor, "B T"]) -> Float[Tensor, " B"]:
        """Returns log p(y | x)."""
        if self.local is None:
            return self.chain.log_prob(y)
        y = y.clamp(min=0)
        steps = self.local
        if steps.dim() == 4:
            before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
            steps = steps.gather(2, before[:, :, None, None].expand(-1, -1, 1, steps.shape[3])).squeeze(2)
        chosen = steps.gather(2, y.unsqueeze(2)).squeeze(2)
        return (chosen * mask_of(self.lengths, y.shape[1])).sum(1)

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Returns log Σ over all taggings that agree with the labels."""
        return self.chain.partial_log_prob(labels)

    def log_score(self, y: Int[Tensor, "B num T"]) -> Float[Tensor, "B num"]:
        """Returns the score of some taggings."""
        return self.chain.log_score(y)

    def argmax(self) -> Taggings:
        """Returns the best tagging (Viterbi)."""
        return self.decoding.argmax()

    def top_k(self, k: int) -> Taggings:
        """Returns the k best taggings."""
        return self.decoding.top_k(k)

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Returns p(y_t = k | x), by forward-backward."""
        return self.chain.marginals()

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draws independent taggings."""
        return self.chain.sample(num, rng)


@final
class ChainHead(nn.Module):
    """States of words to a law that looks at the last tag: softmax, memm or crf."""

    def __init__(self, law: str, width: int, num_tags: int, allowed: Allowed | None) -> None:
        super().__init__()
        self.law, self.allowed = law, allowed
        self.emit = nn.Linear(width, num_tags)
        if law != "softmax":
            self.transitions = nn.Parameter(torch.zeros(num_tags, num_tags))
            self.start = nn.Parameter(torch.zeros(num_tags))
            self.end = nn.Parameter(torch.zeros(num_tags)) if law == "crf" else None

    def forward(self, h: Float[Tensor, "B T H"], lengths: Int[Tensor, " B"]) -> ChainLaw:
        """Returns the law of the tags of these sentences."""
        return self.of(self.emit(h), lengths)

    def of(self, e: Float[Tensor, "B T K"], lengths: Int[Tensor, " B"]) -> ChainLaw:
        """Returns the law with these emissions."""
        K = e.shape[2]
        if self.law == "crf":
            chain = LinearChain(
                e, self.transitions, start=self.start, end=self.end, lengths=lengths, allowed=self.allowed
            )
            return ChainLaw(chain, chain, lengths)
        if self.law == "softmax":
            local = e.log_softmax(2)
            emissions, steps = local, e.new_zeros(K, K)
        else:
            first = (e[:, :1] + self.start).log_softmax(2)
            after = (e[:, 1:, None, :] + self.transitions).log_softmax(3)  # [B, T − 1, K, K]
            local = torch.cat([first.unsqueeze(2).expand(-1, -1, K, -1), after], 1)
            emissions = torch.cat([first, torch.zeros_like(e[:, 1:])], 1)
            steps = after if e.shape[1] > 1 else self.transitions
        chain = LinearChain(emissions, steps, lengths=lengths)
        decoding = chain
        if self.allowed is not None:
            decoding = LinearChain(emissions, steps, lengths=lengths, allowed=self.allowed)
        return ChainLaw(chain, decoding, lengths, local)
