"""The sums of semi-Markov chains, in log space; equations in ``segments``.

expected counts = ∂ log Z / ∂ potentials:  of segments, of neighbours, of first and of last labels
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.structured.log_space import lse

INSIDE = -2  # the label of a position that continues a segment
INF = float("inf")


class SegmentPotentials(NamedTuple):
    """Potentials in float64, −inf where forbidden; A, start and end with one entry per row.

    A may have a matrix per boundary, [B, T − 1, K, K] with entry t − 1 for segments that begin at t.
    """

    segments: Float[Tensor, "B T D K"]
    A: Float[Tensor, "B K K"]
    start: Float[Tensor, "B K"]
    end: Float[Tensor, "B K"]
    lengths: Int[Tensor, " B"]


def forward(p: SegmentPotentials) -> tuple[list[Tensor], list[Tensor]]:
    """Return a_1 … a_T and c_0 … c_{T−1}, all [B, K]."""
    T, D = p.segments.shape[1:3]
    a: list[Tensor] = []
    c = [p.start]
    for t in range(1, T + 1):
        ways = [c[t - d] + p.segments[:, t - d, d - 1] for d in range(1, min(D, t) + 1)]
        a.append(lse(torch.stack(ways), 0))
        if t < T:
            A = p.A if p.A.dim() == 3 else p.A[:, t - 1]
            c.append(lse(a[-1].unsqueeze(-1) + A, 1))
    return a, c


def log_partition(p: SegmentPotentials) -> Float[Tensor, " B"]:
    """Return log Z, 0 for a row without positions."""
    a = torch.stack(forward(p)[0], 1)  # [B, T, K]
    last = (p.lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, a.shape[2])
    return torch.where(p.lengths > 0, lse(a.gather(1, last).squeeze(1) + p.end, 1), 0.0)


def expected_counts(p: SegmentPotentials) -> SegmentPotentials:
    """Return the gradients of log Z by row; they are differentiable where the potentials are."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in p)
    with torch.enable_grad():
        rows = [t if t.requires_grad and needs_grad else t.detach().requires_grad_() for t in p[:4]]
        log_z = log_partition(SegmentPotentials(rows[0], rows[1], rows[2], rows[3], p.lengths))
        counts = torch.autograd.grad(log_z.sum(), rows, create_graph=needs_grad, materialize_grads=True)
    return SegmentPotentials(counts[0], counts[1], counts[2], counts[3], p.lengths)


def boundary_marginals(p: SegmentPotentials) -> Float[Tensor, "B T1 K K"]:
    """Return at t − 1 the probability that label k begins at t after label j: ∂ log Z / ∂ A_t."""
    T = p.segments.shape[1]
    return expected_counts(p._replace(A=p.A.unsqueeze(1).expand(-1, T - 1, -1, -1))).A


def allowed_segments(labels: Bool[Tensor, "B T K"], longest: int) -> Bool[Tensor, "B T D K"]:
    """Return for which begin s, duration d and label k all of s … s + d − 1 may have the label k."""
    found = [labels]
    for d in range(1, longest):
        ahead = torch.nn.functional.pad(labels[:, d:], (0, 0, 0, min(d, labels.shape[1])), value=False)
        found.append(found[-1] & ahead)
    return torch.stack(found, 2)


@final
@dataclass(frozen=True, slots=True)
class Cuts:
    """Labellings [B, num, T] as segments: where one begins, its duration, its label and the label before it."""

    begins: Tensor
    duration: Tensor
    label: Tensor
    before: Tensor  # −1 for the first segment
    is_last: Tensor

    def log_score(self, p: SegmentPotentials) -> Float[Tensor, "B num"]:
        """Return the sum of the potentials."""
        B, T, D, _ = p.segments.shape
        rows = torch.arange(B, device=self.label.device).view(B, 1, 1)
        place = torch.arange(T, device=self.label.device)
        score = p.segments[rows, place, self.duration.clamp(1, D) - 1, self.label]
        score = torch.where(self.duration <= D, score, -INF)
        entered = torch.where(
            self.before < 0, p.start[rows, self.label], p.A[rows, self.before.clamp(min=0), self.label]
        )
        left = torch.where(self.is_last, p.end[rows, self.label], 0.0)
        return torch.where(self.begins, score + entered + left, 0.0).sum(-1)


def cut(y: Int[Tensor, "B num T"], lengths: Int[Tensor, " B"], num_labels: int) -> Cuts:
    """Read segments off labellings, and refuse what is none."""
    T = y.shape[-1]
    place = torch.arange(T, device=y.device)
    inside = place < lengths.view(-1, 1, 1)
    begins = inside & (y != INSIDE)
    wrong = begins & ((y < 0) | (y >= num_labels)) | (inside & (place == 0) & ~begins)
    if bool(wrong.any()):
        row, n, t = wrong.nonzero()[0].tolist()
        what = f"{int(y[row, n, t])} at position {t} of sequence {row} is not a label"
        raise UserError(f"{what}: a segment begins with a label from 0 to {num_labels - 1}, others are {INSIDE}")
    after = torch.where(begins, place, lengths.view(-1, 1, 1)).flip(-1)  # the next beginning, or the end of the row
    after = torch.cat([lengths.view(-1, 1, 1).expand(*y.shape[:2], 1), after], -1).cummin(-1).values[..., :-1].flip(-1)
    last_begin = torch.where(begins, place, -1).cummax(-1).values
    previous = torch.nn.functional.pad(last_begin, (1, -1), value=-1)
    label = torch.where(begins, y, 0)
    before = torch.where(previous >= 0, label.gather(-1, previous.clamp(min=0)), -1)
    return Cuts(begins, after - place, label, before, after == lengths.view(-1, 1, 1))
