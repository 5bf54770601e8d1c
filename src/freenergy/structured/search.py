"""Best labellings and draws of a chain.

Viterbi      d_t(k) = x_t(k) + max_j( d_{t−1}(j) + A_jk ), and the maximisers backwards
k best       the same with the k largest instead of one
draws        y_L ~ exp a_L(·),    y_{t−1} ~ exp( a_{t−1}(·) + A_{· y_t} ): exact, from the last position backwards
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.structured.distribution import NO_LABEL
from freenergy.structured.log_space import alphas, step
from freenergy.structured.partition import detached, recursion
from freenergy.structured.plain import BAD, PlainChains
from freenergy.structured.potentials import INF, Potentials


def argmax(p: Potentials) -> tuple[Int[Tensor, "B T"], Float[Tensor, " B"]]:
    """Return the best labelling, packed, and its score; NO_LABEL and −inf where none is allowed."""
    x, A, start, end = detached(p)
    way = recursion(p, A)
    if isinstance(way, PlainChains):
        p.refuse_bad_numbers()
        labels, score = top_k(p, 1)
        return labels[:, 0], score[:, 0]
    labels, score, status = way.best(x, A, start, end, p.positions.lengths)
    if bool((status == BAD).any()):
        p.refuse_bad_numbers()
    return labels, score


def top_k(p: Potentials, k: int) -> tuple[Int[Tensor, "B k T"], Float[Tensor, "B k"]]:
    """Return the k best labellings, packed, best first; NO_LABEL and −inf where there are fewer."""
    with torch.no_grad():
        x, A = p.dense()
    B, T, K = x.shape
    d = torch.full((B, K, k), -INF, dtype=x.dtype, device=x.device)  # the k best scores that end in each label
    d[:, :, 0] = x[:, 0]
    back = torch.zeros(T, B, K, k, dtype=torch.long, device=x.device)  # previous label · k + its rank
    stay = torch.arange(K * k, device=x.device).view(1, K, k)
    for t in range(1, T):
        best, index = (d.unsqueeze(2) + step(A, t).unsqueeze(-1)).permute(0, 2, 1, 3).reshape(B, K, K * k).topk(k, -1)
        inside = (t < p.positions.lengths).view(B, 1, 1)
        d = torch.where(inside, best + x[:, t].unsqueeze(-1), d)
        back[t] = torch.where(inside, index, stay)
    score, state = d.reshape(B, K * k).topk(k, -1)
    labels = torch.full((B, k, T), NO_LABEL, dtype=torch.long, device=x.device)
    for t in range(T - 1, -1, -1):
        labels[:, :, t] = state // k
        state = back[t].reshape(B, K * k).gather(1, state)
    labels = torch.where((score > -INF).unsqueeze(-1) & p.positions.kept.unsqueeze(1), labels, NO_LABEL)
    empty = (p.positions.lengths == 0).unsqueeze(1)
    first = torch.arange(k, device=x.device) == 0
    return labels, torch.where(empty, torch.where(first, 0.0, -INF), score)


def sample(p: Potentials, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
    """Draw labellings, packed. Row b, draw n uses its own stream, whatever the batch and the padding around it."""
    with torch.no_grad():
        (_, A), a = p.dense(), alphas(p)
    B, T, K = a.shape
    rows, lengths = rng.rows(B, num, T), p.positions.lengths
    labels = torch.full((B, num, T), NO_LABEL, dtype=torch.long, device=a.device)
    point = torch.full((B, num, K), -INF, dtype=a.dtype, device=a.device)
    point[:, :, 0] = 0.0  # what rows that have ended draw: one outcome
    y = torch.zeros(B, num, dtype=torch.long, device=a.device)
    for i in range(int(lengths.max()) if B else 0):
        t = lengths - 1 - i  # every row counts from its own end
        log_p = a.gather(1, t.clamp(min=0).view(B, 1, 1).expand(B, 1, K)).expand(B, num, K)
        log_p = log_p if i == 0 else log_p + _into(A, t + 1, y)
        y = rows.categorical(torch.where((t >= 0).view(B, 1, 1), log_p, point))
        here = (t == torch.arange(T, device=t.device).unsqueeze(1)).T.unsqueeze(1)  # [B, 1, T]
        labels = torch.where(here, y.unsqueeze(-1), labels)
    return labels


def _into(A: Tensor, t: Tensor, y: Int[Tensor, "B num"]) -> Float[Tensor, "B num K"]:
    """Return A_t(·, y) for the step into position t of each row."""
    if A.dim() == 2:
        return A.T[y]
    here = A[torch.arange(len(t), device=t.device), (t - 1).clamp(0, A.shape[1] - 1)]  # [B, K, K]
    return here.transpose(1, 2).gather(1, y.unsqueeze(-1).expand(*y.shape, A.shape[-1]))
