"""Semi-Markov chains: labels of segments instead of labels of positions.

    score = start(k_1) + Σ_i [ φ(s_i, d_i, k_i) + A(k_{i−1}, k_i) ] + end(k_n),    s_{i+1} = s_i + d_i ≤ L,  1 ≤ d_i ≤ D

    a_t(k) = lse_d( c_{t−d}(k) + φ(t − d, d, k) )     the segmentations of the first t positions whose last label is k
    c_0 = start,    c_t(k) = lse_j( a_t(j) + A_jk ),        log Z = lse_k( a_L(k) + end(k) )

The segment that begins at s with d positions and label k has its score in ``segments[b, s, d − 1, k]``. In a labelling
y the first position of a segment has its label and the others have ``INSIDE``. All sums are in log space and float64,
so any numbers will do and gradients may be taken as often as one likes; the cost is T · (D · K + K²).
"""

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured import distribution, segment_search
from freenergy.structured.allowed import Allowed
from freenergy.structured.distribution import NO_LABEL, Taggings
from freenergy.structured.positions import positions
from freenergy.structured.potentials import check_shape
from freenergy.structured.segment_sums import (
    INSIDE,
    SegmentPotentials,
    allowed_segments,
    boundary_marginals,
    cut,
    expected_counts,
    log_partition,
)

INF = float("inf")


@final
class SegmentChain:
    """A batch of semi-Markov chains over K labels with segments of up to D positions.

    ``segments`` is [B, T, D, K], ``transitions`` [K, K], ``start`` and ``end`` [K], ``lengths`` [B]; ``allowed`` may
    forbid pairs of neighbouring segments, first and last labels.

    >>> chain = SegmentChain(torch.zeros(1, 4, 4, 1), torch.zeros(1, 1))  # the 8 ways to cut 4 positions
    >>> round(chain.log_partition().exp().item(), 3)
    8.0
    """

    def __init__(
        self,
        segments: Tensor,
        transitions: Tensor,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Tensor | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        if segments.dim() != 4 or 0 in segments.shape[1:]:
            shape = list(segments.shape)
            raise UserError(f"segments have the shape {shape}: give [sequences, positions, durations, labels], none 0")
        B, T, _, K = segments.shape
        for name, values, shape in (("transitions", transitions, [K, K]), ("start", start, [K]), ("end", end, [K])):
            if values is not None and list(values.shape) != shape:
                raise UserError(f"{name} has the shape {list(values.shape)}: with {K} labels it is {shape}")
        if allowed is not None and allowed.labels is not None:
            raise UserError("allowed.labels is about positions: forbid a segment by a score of −inf")
        self._given = segments, transitions, {"start": start, "end": end, "lengths": lengths}, allowed
        self.shape, self._dtype = (B, T, K), segments.dtype
        self._positions = positions(B, T, lengths, None, segments.device)
        self._potentials = _potentials(segments, transitions, start, end, allowed or Allowed(), self._positions.lengths)

    def log_partition(self) -> Float[Tensor, " B"]:
        """Return log Z; −inf where nothing is allowed, 0 for a row without positions."""
        log_z = log_partition(self._potentials)
        if not bool((log_z.detach() < INF).all()):
            raise UserError("segments or transitions contain NaN or +inf: the network that made them has diverged")
        return log_z.to(self._dtype)

    def log_score(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return the score of labellings; −inf where a segment is longer than D or a neighbour is forbidden."""
        rows = cut(y.reshape(self.shape[0], -1, self.shape[1]), self._positions.lengths, self.shape[2])
        return rows.log_score(self._potentials).view(-1, *y.shape[1:-1]).to(self._dtype)

    def log_prob(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return log p(y)."""
        return self.log_score(y) - self._log_partition_of_paths().view(-1, *[1] * (y.dim() - 2))

    def segment_marginals(self) -> Float[Tensor, "B T D K"]:
        """Return the probability that a segment begins at s, has d positions and label k."""
        self._log_partition_of_paths()
        return expected_counts(self._potentials).segments.to(self._dtype)

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Return the probability that position t lies in a segment with label k."""
        counts = self.segment_marginals().double()
        B, T, D, K = counts.shape
        change = torch.zeros(B, T + D, K, dtype=counts.dtype, device=counts.device)
        change[:, :T] += counts.sum(2)
        for d in range(D):
            change[:, d + 1 : d + 1 + T] -= counts[:, :, d]
        return change.cumsum(1)[:, :T].to(self._dtype)

    def pair_marginals(self) -> Float[Tensor, "B T1 K K"]:
        """Return the probability, at entry t − 1, that a segment of label k begins at t after one of label j."""
        self._log_partition_of_paths()
        return boundary_marginals(self._potentials).to(self._dtype)

    def condition(self, labels: Bool[Tensor, "B T K"]) -> "SegmentChain":
        """Return the chain given that the segment around each position has a label of that position's set."""
        segments, transitions, others, allowed = self._given
        check_shape("label sets", labels, (self.shape,))
        fits = allowed_segments(labels.to(segments.device) | ~self._positions.mask.unsqueeze(-1), segments.shape[2])
        return SegmentChain(torch.where(fits, segments, -INF), transitions, **others, allowed=allowed)

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Return the log-probability of ``condition``'s event: the sum over all compatible segmentations."""
        return distribution.partial_log_prob(self, labels, "segmentation")

    def posterior_argmax(self) -> Int[Tensor, "B T"]:
        """Return the most probable label of each position."""
        return distribution.posterior_argmax(self.marginals(), self._positions.mask)

    def expectation(
        self, labels: Float[Tensor, "B T K"] | None = None, pairs: Float[Tensor, "*steps K K"] | None = None
    ) -> Float[Tensor, " B"]:
        """Return E[ Σ_t labels_t(label around t) + Σ_i pairs(k_{i−1}, k_i) ], i over neighbouring segments."""
        return distribution.expectation(self, labels, pairs)

    def argmax(self) -> Taggings:
        """Return the most probable segmentation of each row and its score."""
        best = self.top_k(1)
        return Taggings(best.labels[:, 0], best.log_score[:, 0])

    def top_k(self, k: int) -> Taggings:
        """Return the k most probable segmentations of each row, best first."""
        if k < 1:
            raise UserError(f"k is {k}: set it to 1 or more")
        self.log_partition()  # refuses NaN
        labels, score = segment_search.top_k(self._potentials, k)
        return Taggings(labels, score.to(self._dtype))

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draw ``num`` independent segmentations of each row."""
        self._log_partition_of_paths()
        return segment_search.sample(self._potentials, num, rng)

    def expected_log_score(self, other: "SegmentChain") -> Float[Tensor, " B"]:
        """Return E_{y ~ self}[other.log_score(y)]; −inf where the other forbids what this one allows."""
        p, q = self._potentials, other._potentials
        if p.segments.shape != q.segments.shape or not torch.equal(p.lengths, q.lengths):
            raise UserError("segment chains of other shapes or lengths cannot be compared: give both the same")
        counts = expected_counts(p)
        pairs = ((counts.segments, q.segments), (counts.A, q.A), (counts.start, q.start), (counts.end, q.end))
        return sum(
            (distribution.weighted(c, values).flatten(1).sum(1) for c, values in pairs), start=p.segments.new_zeros(())
        )

    def entropy(self) -> Float[Tensor, " B"]:
        """Return H(p) in nats."""
        return distribution.entropy(self)

    def cross_entropy(self, other: "SegmentChain") -> Float[Tensor, " B"]:
        """Return −E_{y ~ self}[log p_other(y)]."""
        return distribution.cross_entropy(self, other)

    def kl(self, other: "SegmentChain") -> Float[Tensor, " B"]:
        """Return KL(self ‖ other)."""
        return distribution.kl(self, other)

    def _log_partition_of_paths(self) -> Float[Tensor, " B"]:
        return distribution.log_partition_of_paths(self, "segmentation", "loosen its constraints")


def spans(y: Int[Tensor, " T"]) -> list[tuple[int, int, int]]:
    """Return the segments of one labelling as (first position, one after the last, label).

    >>> spans(torch.tensor([3, INSIDE, 0, NO_LABEL]))
    [(0, 2, 3), (2, 3, 0)]
    """
    values = [label for label in y.tolist() if label != NO_LABEL]
    starts = [t for t, label in enumerate(values) if label != INSIDE]
    return [(s, e, values[s]) for s, e in zip(starts, [*starts[1:], len(values)], strict=True)]


def _potentials(
    segments: Tensor, A: Tensor, start: Tensor | None, end: Tensor | None, allowed: Allowed, lengths: Tensor
) -> SegmentPotentials:
    B, _, _, K = segments.shape
    zero = segments.new_zeros(K, dtype=torch.float64)
    rows = [
        (A.double(), allowed.pairs),
        (zero if start is None else start.double(), allowed.start),
        (zero if end is None else end.double(), allowed.end),
    ]
    A, start, end = ((t if ok is None else torch.where(ok.to(t.device), t, -INF)).expand(B, *t.shape) for t, ok in rows)
    return SegmentPotentials(segments.double(), A, start, end, lengths)
