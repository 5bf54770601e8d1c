"""The linear-chain conditional random field: a distribution over label sequences, with all its sums.

    p(y) = exp(score(y)) / Z,      score(y) = start(y_1) + Σ_t φ_t(y_t) + Σ_{t ≥ 2} A_t(y_{t−1}, y_t) + end(y_L)

Positions that a mask takes out do not exist; what ``allowed`` forbids has probability 0. A row without positions has
one tagging, the empty one. Where nothing is allowed, ``log_partition`` is −inf, ``argmax`` and ``top_k`` give the score
−inf and no labels, and all else refuses.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured import distribution, log_space, partition, score, search
from freenergy.structured.allowed import Allowed
from freenergy.structured.distribution import Taggings
from freenergy.structured.positions import positions
from freenergy.structured.potentials import potentials


@final
class LinearChain:
    """A batch of B chains over K labels.

    ``emissions`` φ is [B, T, K]; ``transitions`` A is [K, K], or [T − 1, K, K] or [B, T − 1, K, K] with entry t − 1 for
    the step into position t (from 0); ``start`` and ``end`` are [K] or [B, K]. ``lengths`` [B] or ``mask`` [B, T] say
    which positions count. Any float type; sums are in float32 or float64, log Z is added up in float64. Everything is
    differentiable, more than once too. Nothing is changed in place: a chain is a value.

    >>> phi = torch.tensor([[[0.5, -0.2], [0.1, 0.4], [-0.3, 0.6]]], dtype=torch.float64)
    >>> A = torch.tensor([[0.7, -0.5], [0.2, 0.3]], dtype=torch.float64)
    >>> chain = LinearChain(phi, A, start=torch.tensor([0.0, 0.1], dtype=torch.float64))
    >>> round(chain.log_partition().item(), 10)
    3.1718131806
    >>> chain.argmax().labels.tolist(), chain.posterior_argmax().tolist()
    ([[0, 0, 0]], [[0, 0, 1]])
    """

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        allowed: Allowed | None = None,
        compiled: bool = True,
    ) -> None:
        if emissions.dim() != 3 or 0 in emissions.shape[1:]:
            raise UserError(
                f"emissions have the shape {list(emissions.shape)}: give [sequences, positions, labels], none 0"
            )
        self._given = _Arguments(emissions, transitions, start, end, lengths, mask, allowed or Allowed(), compiled)
        self._positions = positions(len(emissions), emissions.shape[1], lengths, mask, emissions.device)
        self._potentials = potentials(
            emissions, transitions, start, end, self._given.allowed, self._positions, compiled
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return B sequences, T positions, K labels."""
        B, T, K = self._given.emissions.shape
        return B, T, K

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Return how many positions of each row count."""
        return self._positions.lengths

    def log_partition(self) -> Float[Tensor, " B"]:
        """Return log Z; −inf for a row where nothing is allowed, 0 for one without positions."""
        return partition.log_partition(self._potentials)

    def log_score(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return score(y), −inf where y is forbidden; labels at masked positions are not looked at."""
        num = y.shape[1:-1]
        y = self._checked(y.reshape(self.shape[0], -1, self.shape[1]))
        return score.log_score(self._potentials, y).view(-1, *num)

    def log_prob(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return log p(y): of one labelling per row [B, T], or of several [B, num, T]."""
        log_z = self._log_partition_of_paths()
        return self.log_score(y) - log_z.view(-1, *[1] * (y.dim() - 2))

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Return the log-probability that every label is in its set: the sum over all compatible taggings."""
        return distribution.partial_log_prob(self, labels, "tagging")

    def condition(self, labels: Bool[Tensor, "B T K"]) -> "LinearChain":
        """Return the chain given that every label is in its set: partial labels, forced decoding."""
        g = self._given
        allowed = g.allowed.with_labels(labels)
        return LinearChain(
            g.emissions,
            g.transitions,
            start=g.start,
            end=g.end,
            lengths=g.lengths,
            mask=g.mask,
            allowed=allowed,
            compiled=g.compiled,
        )

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Return p(y_t = k); 0 at masked positions."""
        self._log_partition_of_paths()
        return self._positions.unpack(partition.marginals(self._potentials))

    def pair_marginals(self) -> Float[Tensor, "B T1 K K"]:
        """Return p(y_s = j, y_t = k) at entry t − 1, where s is the kept position before t; 0 where there is none."""
        self._log_partition_of_paths()
        pairs = log_space.pair_marginals(self._potentials)
        return self._positions.unpack_steps(pairs).to(self._potentials.emissions.dtype)

    def argmax(self) -> Taggings:
        """Return the most probable tagging of each row (Viterbi) and its score."""
        labels, best = search.argmax(self._potentials)
        if self._positions.order is not None:
            labels = self._positions.unpack_labels(labels.unsqueeze(1)).squeeze(1)
        return Taggings(labels, best.to(self._potentials.emissions.dtype))

    def posterior_argmax(self) -> Int[Tensor, "B T"]:
        """Return the most probable label of each position: most expected right labels, perhaps a forbidden tagging."""
        return distribution.posterior_argmax(self.marginals(), self._positions.mask)

    def top_k(self, k: int) -> Taggings:
        """Return the k most probable taggings of each row, best first."""
        if k < 1:
            raise UserError(f"k is {k}: set it to 1 or more")
        self._potentials.refuse_bad_numbers()
        labels, scores = search.top_k(self._potentials, k)
        return Taggings(self._positions.unpack_labels(labels), scores.to(self._potentials.emissions.dtype))

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draw ``num`` independent taggings of each row."""
        self._log_partition_of_paths()
        return self._positions.unpack_labels(search.sample(self._potentials, num, rng))

    def expectation(
        self, labels: Float[Tensor, "B T K"] | None = None, pairs: Float[Tensor, "*steps K K"] | None = None
    ) -> Float[Tensor, " B"]:
        """Return E[ Σ_t labels_t(y_t) + Σ_{t ≥ 2} pairs_t(y_{t−1}, y_t) ]; shapes as of emissions and transitions."""
        return distribution.expectation(self, labels, pairs)

    def expected_log_score(self, other: "LinearChain") -> Float[Tensor, " B"]:
        """Return E_{y ~ self}[other.log_score(y)]; −inf where the other forbids what this one allows."""
        if other.shape != self.shape or not torch.equal(other._positions.kept, self._positions.kept):
            raise UserError(f"chains of shapes {self.shape} and {other.shape}, or of other lengths, cannot be compared")
        x, A = other._potentials.dense()
        labels = distribution.weighted(self._positions.pack(self.marginals().double()), x).sum((1, 2))
        if self.shape[1] == 1:
            return labels
        return labels + distribution.weighted(log_space.pair_marginals(self._potentials), A).sum((1, 2, 3))

    def entropy(self) -> Float[Tensor, " B"]:
        """Return H(p) in nats."""
        return distribution.entropy(self)

    def cross_entropy(self, other: "LinearChain") -> Float[Tensor, " B"]:
        """Return −E_{y ~ self}[log p_other(y)]."""
        return distribution.cross_entropy(self, other)

    def kl(self, other: "LinearChain") -> Float[Tensor, " B"]:
        """Return KL(self ‖ other)."""
        return distribution.kl(self, other)

    def _log_partition_of_paths(self) -> Float[Tensor, " B"]:
        remedy = "loosen its constraints or correct its labels"
        return distribution.log_partition_of_paths(self, "tagging", remedy)

    def _checked(self, y: Int[Tensor, "B num T"]) -> Int[Tensor, "B num T"]:
        """Return labels, packed, 0 at positions that do not count."""
        K = self.shape[2]
        y = self._positions.pack(y.transpose(1, 2)).transpose(1, 2)
        y = y if self._positions.is_full else torch.where(self._positions.kept.unsqueeze(1), y, 0)
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < K:
            row, n, position = ((y < 0) | (y >= K)).nonzero()[0].tolist()
            label = int(y[row, n, position])
            raise UserError(f"label {label} of sequence {row} is not in the tag set: labels run from 0 to {K - 1}")
        return y


@final
@dataclass(frozen=True, slots=True)
class _Arguments:
    emissions: Tensor
    transitions: Tensor
    start: Tensor | None
    end: Tensor | None
    lengths: Tensor | None
    mask: Tensor | None
    allowed: Allowed
    compiled: bool
