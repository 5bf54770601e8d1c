"""Best segmentations and draws of semi-Markov chains; equations in ``segments``.

best     the recursion with the k largest instead of sums; every entry keeps its duration and the entry before it
draws    the last label from a_L + end; its duration d from c_{t−d} + φ; the label before from a_{t−d} + A; and so on
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.structured.distribution import NO_LABEL
from freenergy.structured.segment_sums import INF, INSIDE, SegmentPotentials, forward


def top_k(p: SegmentPotentials, k: int) -> tuple[Int[Tensor, "B k T"], Float[Tensor, "B k"]]:
    """Return the k best labellings, best first; NO_LABEL and −inf where there are fewer."""
    segments, A, start, end = (t.detach() for t in p[:4])
    B, T, D, K = segments.shape
    none = torch.full((B, K, k), -INF, dtype=segments.dtype, device=segments.device)
    first = none.clone()
    first[:, :, 0] = start
    entered, from_entry = [first], [torch.full((B, K, k), -1, device=segments.device)]  # before a segment with label k
    best, duration, rank = [none], [torch.zeros_like(from_entry[0])], [torch.zeros_like(from_entry[0])]
    for t in range(1, T + 1):
        spread = range(1, min(D, t) + 1)
        ways = torch.cat([entered[t - d] + segments[:, t - d, d - 1].unsqueeze(-1) for d in spread], -1)
        top, index = ways.topk(k, -1)
        best.append(top)
        duration.append(index // k + 1)
        rank.append(index % k)
        step = (top.unsqueeze(2) + A.unsqueeze(-1)).permute(0, 2, 1, 3).reshape(B, K, K * k)
        value, index = step.topk(k, -1)
        entered.append(value)
        from_entry.append(index)  # label before · k + its rank
    rows = torch.arange(B, device=segments.device)
    lengths = p.lengths
    ends = torch.stack(best)[lengths, rows] + end.unsqueeze(-1)
    score, state = ends.reshape(B, K * k).topk(k, -1)
    labels = _back(torch.stack(duration), torch.stack(rank), torch.stack(from_entry), lengths, state)
    inside = torch.arange(T, device=segments.device) < lengths.view(B, 1, 1)
    labels = torch.where((score > -INF).unsqueeze(-1) & inside, labels, NO_LABEL)
    empty = torch.where(torch.arange(k, device=segments.device) == 0, 0.0, -INF)
    return labels, torch.where((lengths == 0).unsqueeze(1), empty, score)


def _back(duration: Tensor, rank: Tensor, from_entry: Tensor, lengths: Tensor, state: Tensor) -> Tensor:
    """Follow every entry back to the first position; all tables are [T + 1, B, K, k]."""
    T, (B, k) = len(duration) - 1, state.shape
    flat = [table.reshape(T + 1, B, -1) for table in (duration, rank, from_entry)]
    rows = torch.arange(B, device=state.device).unsqueeze(1)
    labels = torch.full((B, k, T + 1), INSIDE, device=state.device)  # one place more, for rows that are done
    t = lengths.unsqueeze(1).expand(B, k)
    for _ in range(T):
        is_open = t > 0
        label, d, r = state // k, flat[0][t, rows, state], flat[1][t, rows, state]
        t = torch.where(is_open, t - d, 0).clamp(min=0)
        labels.scatter_(2, torch.where(is_open, t, T).unsqueeze(-1), label.unsqueeze(-1))
        state = torch.where(is_open, flat[2][t, rows, label * k + r], state).clamp(min=0)
    return labels[..., :T]


def sample(p: SegmentPotentials, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
    """Draw labellings; row b, draw n uses its own stream, whatever the batch and the padding around it."""
    with torch.no_grad():
        a, c = (torch.stack(steps) for steps in forward(p))  # [T, B, K]
    B, T, D, K = p.segments.shape
    rows, b = rng.rows(B, num, 2 * T), torch.arange(B, device=a.device).unsqueeze(1)
    labels = torch.full((B, num, T + 1), INSIDE, device=a.device)
    t = p.lengths.unsqueeze(1).expand(B, num)
    spread = torch.arange(1, D + 1, device=a.device)
    after = p.end.detach().unsqueeze(1).expand(B, num, K)
    for _ in range(int(p.lengths.max()) if B else 0):
        is_open = (t > 0).unsqueeze(-1)
        label = rows.categorical(_one_outcome(is_open, a[(t - 1).clamp(min=0), b] + after))
        begin = t.unsqueeze(-1) - spread  # [B, num, D]
        ways = c[begin.clamp(min=0), b.unsqueeze(-1), label.unsqueeze(-1)]
        ways = ways + p.segments.detach()[b.unsqueeze(-1), begin.clamp(min=0), spread - 1, label.unsqueeze(-1)]
        ways = torch.where(begin >= 0, ways, -INF)
        d = rows.categorical(_one_outcome(is_open, ways)) + 1
        t = torch.where(is_open.squeeze(-1), t - d, 0)
        labels.scatter_(2, torch.where(is_open.squeeze(-1), t, T).unsqueeze(-1), label.unsqueeze(-1))
        after = p.A.detach()[b, :, label]
    inside = torch.arange(T, device=a.device) < p.lengths.view(B, 1, 1)
    return torch.where(inside, labels[..., :T], NO_LABEL)


def _one_outcome(is_open: Tensor, log_p: Tensor) -> Tensor:
    """Return the law of rows that go on; those that are done have one outcome."""
    point = torch.full_like(log_p, -INF)
    point[..., 0] = 0.0
    return torch.where(is_open, log_p, point)
