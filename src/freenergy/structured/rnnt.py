"""The general transducer (RNN-T): labels between frames, each step normalised over the labels and the blank.

    p(y | x) = Σ_π Π_j p(π_j | frame t_j, labels so far),      π = T blanks and U labels; a blank goes to the next frame
    a(t, u) = lse( a(t−1, u) + blank(t−1, u),  a(t, u−1) + label(t, u−1) )
    log p(y | x) = a(T−1, U) + blank(T−1, U)

The T × (U + 1) lattice is walked by its diagonals n = t + u. The backward pass is the same recursion from the end:
posteriors of the steps, no graph. A row without frames has probability 1 for no labels. Legend: B rows, T frames, U
labels, C symbols.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.structured.distribution import NO_LABEL
from freenergy.structured.log_space import lse

INF = float("inf")


def rnnt_log_prob(
    log_probs: Float[Tensor, "B T U1 C"], y: Int[Tensor, "B U"], lengths: Int[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """Return log p(y | x); ``log_probs[b, t, u]`` is the law of the next symbol at frame t after u labels, 0 is the
    blank.

    Label sequences are padded with NO_LABEL behind their ends. A row of no frames and some labels has −inf, gradient 0.
    """
    B, T, U1, C = log_probs.shape
    if y.shape != (B, U1 - 1):
        raise UserError(
            f"labels have the shape {list(y.shape)}: give [{B}, {U1 - 1}] for {U1} places before and after them"
        )
    if y.numel() and (int(y.max()) >= C or bool(((y < 1) & (y != NO_LABEL)).any())):
        raise UserError(f"a label is not in the alphabet: labels run from 1 to {C - 1}")
    lengths = torch.full((B,), T, device=y.device) if lengths is None else lengths
    num_labels = (y != NO_LABEL).sum(1)
    if not T or not B:
        return torch.where(num_labels == 0, 0.0, -INF).to(log_probs)
    label = log_probs[:, :, :-1].gather(3, y.clamp(min=0).view(B, 1, U1 - 1, 1).expand(B, T, U1 - 1, 1)).squeeze(3)
    found = lattice_log_sum(log_probs[..., 0], label, lengths.clamp(min=1), num_labels)
    return torch.where(lengths > 0, found, torch.where(num_labels == 0, 0.0, -INF).to(found))


def lattice_log_sum(
    blank: Float[Tensor, "B T U1"],
    label: Float[Tensor, "B T U"],
    lengths: Int[Tensor, " B"],
    num_labels: Int[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """Return the log-sum over all paths of the lattice; every row has a frame."""
    label = torch.nn.functional.pad(label, (0, 1), value=-INF)
    found: Tensor = _Lattice.apply(blank, label, lengths, num_labels)  # type: ignore[no-untyped-call]
    return found


def skewed(values: Float[Tensor, "B T U1"]) -> Float[Tensor, "N B U1"]:
    """Return the values by diagonals n = t + u, −inf outside of the lattice."""
    _, T, U1 = values.shape
    n, u = torch.arange(T + U1 - 1, device=values.device).unsqueeze(1), torch.arange(U1, device=values.device)
    t = n - u
    found = values[:, t.clamp(0, T - 1), u.expand_as(t)].double()
    return torch.where((t >= 0) & (t < T), found, -INF).transpose(0, 1)


def straight(values: Float[Tensor, "N B U1"], T: int) -> Float[Tensor, "B T U1"]:
    """Undo ``skewed``."""
    U1 = values.shape[2]
    t, u = torch.arange(T, device=values.device).unsqueeze(1), torch.arange(U1, device=values.device)
    return values.transpose(0, 1)[:, t + u, u.expand(T, U1)]


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return the values of the place before (by = 1) or after (−1), −inf beyond the border."""
    border = values.new_full((len(values), 1), -INF)
    return torch.cat([border, values[:, :-1]], 1) if by == 1 else torch.cat([values[:, 1:], border], 1)


def _forward(blank: Tensor, label: Tensor, add: Any) -> Tensor:
    """Return a by diagonals [N, B, U1]."""
    start = torch.full_like(blank[0], -INF)
    start[:, 0] = 0.0
    steps = [start]
    for n in range(1, len(blank)):
        steps.append(add(steps[-1] + blank[n - 1], _shifted(steps[-1] + label[n - 1], 1)))
    return torch.stack(steps)


def plain_lattice_log_sum(blank: Tensor, label: Tensor, lengths: Tensor, num_labels: Tensor) -> Float[Tensor, " B"]:
    """Return the same as ``lattice_log_sum``, differentiable more than once; label is padded to U + 1."""
    b, k = skewed(blank), skewed(label)
    a = _forward(b, k, lambda p, q: lse(torch.stack([p, q]), 0)) + b
    return a[lengths - 1 + num_labels, torch.arange(len(lengths), device=a.device), num_labels].to(blank.dtype)


class _Lattice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blank: Tensor, label: Tensor, lengths: Tensor, num_labels: Tensor) -> Tensor:
        b, k = skewed(blank), skewed(label)
        a = _forward(b, k, torch.logaddexp)
        rows = torch.arange(len(lengths), device=a.device)
        total = (a + b)[lengths - 1 + num_labels, rows, num_labels]
        ctx.save_for_backward(blank, label, lengths, num_labels, a, total)
        return total.to(blank.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        blank, label, lengths, num_labels, a, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller will differentiate again
            value = plain_lattice_log_sum(blank, label, lengths, num_labels)
            found = torch.autograd.grad(value, (blank, label), grad, create_graph=True, materialize_grads=True)
            return found[0], found[1], None, None
        b, k = skewed(blank), skewed(label)
        by_blank, by_label = _posteriors(a, b, k, total, lengths - 1 + num_labels, num_labels)
        scale, T = grad.double().view(-1, 1, 1), blank.shape[1]
        by_blank, by_label = ((straight(p, T) * scale).to(blank.dtype) for p in (by_blank, by_label))
        return by_blank, by_label, None, None


def _posteriors(
    a: Tensor, blank: Tensor, label: Tensor, total: Tensor, last: Tensor, num_labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the probability of each step by diagonals: of a blank, of a label; 0 in rows that have no path."""
    place = torch.arange(a.shape[2], device=a.device)
    ends = place == num_labels.unsqueeze(1)
    after = torch.full_like(a[0], -INF)  # log-sum of what may follow each place of the next diagonal
    by_blank, by_label = torch.zeros_like(a), torch.zeros_like(a)
    shift = torch.where(total > -INF, total, INF).unsqueeze(1)  # exp(−inf) in a row without a path
    for n in range(len(a) - 1, -1, -1):
        is_end = ends & (last == n).unsqueeze(1)
        next_blank = torch.where(is_end, 0.0, after)
        next_label = _shifted(after, -1)
        by_blank[n] = (a[n] + blank[n] + next_blank - shift).exp()
        by_label[n] = (a[n] + label[n] + next_label - shift).exp()
        after = torch.logaddexp(blank[n] + next_blank, label[n] + next_label)
    return by_blank, by_label
