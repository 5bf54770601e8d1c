"""Best paths, draws and expectations of the paths of a graph.

Viterbi      d_t(s) = x_t(s) + max_{r → s}( d_{t−1}(r) + w_rs ), and the maximisers backwards
draws        π_T ~ exp( a_T + final ),   π_{t−1} ~ exp( a_{t−1}(·) + w_{· π_t} ) over the arcs into π_t: exact
E[score]     ⟨∂ log Z / ∂x, x⟩ + ⟨∂ log Z / ∂w, w⟩ + …: a gradient of log Z is an expectation
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.structured.distribution import NO_LABEL
from freenergy.structured.graph_sums import GraphTensors, graph_alphas, graph_log_sum
from freenergy.structured.label_graph import LabelGraph

INF = float("inf")


class FramePaths(NamedTuple):
    """Paths: the symbol of each frame, the label that each frame begins (0: none), and the score of the path.

    Symbols and labels are NO_LABEL beyond a row's end, and everywhere in a row without a path.
    """

    symbols: Int[Tensor, "B *num T"]
    begins: Int[Tensor, "B *num T"]
    log_score: Float[Tensor, " B *num"]

    def labels(self) -> list[list[int]]:
        """Return the label sequence of each path, of all rows one after another."""
        return [[v for v in row if v > 0] for row in self.begins.reshape(-1, self.begins.shape[-1]).tolist()]


class _ArcsInto(NamedTuple):
    """The arcs into each state, padded: their numbers [S, D], and which are there."""

    arc: Tensor
    exists: Tensor

    @classmethod
    def of(cls, graph: LabelGraph, device: torch.device) -> "_ArcsInto":
        order = np.argsort(graph.target, kind="stable")
        count = np.bincount(graph.target, minlength=graph.num_states)
        first = np.cumsum(count) - count
        place = first[:, None] + np.arange(max(1, count.max(initial=0)))
        exists = np.arange(place.shape[1]) < count[:, None]
        padded = np.append(order, 0)[np.where(exists, place, len(order))]
        return cls(torch.from_numpy(padded).to(device), torch.from_numpy(exists).to(device))


def best_path(x: Tensor, lengths: Tensor, graph: LabelGraph, g: GraphTensors) -> FramePaths:
    """Return the best path of each row; no symbols and −inf where there is none."""
    into, (B, T, _) = _ArcsInto.of(graph, x.device), x.shape
    own = x.double().transpose(0, 1)[:, :, g.symbol]
    if not T:
        return _frame_paths(x, lengths, graph, *(torch.zeros(B, 1, 0, dtype=torch.long),) * 2, torch.zeros(B, 1))
    weight = (
        torch.where(into.exists, g.log_weight[into.arc], -INF) if len(g.source) else torch.full(into.arc.shape, -INF)
    )
    source = g.source[into.arc] if len(g.source) else into.arc
    d, back = own[0] + g.initial, [torch.zeros(B, graph.num_states, dtype=torch.long, device=x.device)]
    for t in range(1, T):
        best, index = (d[:, source] + weight).max(2)
        inside = (t < lengths).unsqueeze(1)
        d = torch.where(inside, own[t] + best, d)
        back.append(into.arc[torch.arange(graph.num_states, device=x.device), index])
    score, state = (d + g.final).max(1)
    states, arcs = (torch.zeros(B, T, dtype=torch.long, device=x.device) for _ in range(2))
    for t in range(T - 1, -1, -1):
        inside = t < lengths
        states[:, t] = state
        arc = back[t].gather(1, state.unsqueeze(1)).squeeze(1)
        arcs[:, t] = arc
        state = torch.where(inside, g.source[arc], state) if t and len(g.source) else state
    return _frame_paths(x, lengths, graph, states.unsqueeze(1), arcs.unsqueeze(1), score.unsqueeze(1), squeeze=True)


def _frame_paths(
    x: Tensor, lengths: Tensor, graph: LabelGraph, states: Tensor, arcs: Tensor, score: Tensor, *, squeeze: bool = True
) -> FramePaths:
    """Turn states [B, num, T] and the arcs into them into symbols and labels."""
    symbol, label, first = (
        torch.from_numpy(each).to(x.device) for each in (graph.symbol, graph.label, graph.first_label)
    )
    T = states.shape[2]
    begins = label[arcs] if len(label) else torch.zeros_like(arcs)
    if T:
        begins[:, :, 0] = first[states[:, :, 0]]
    kept = (torch.arange(T, device=x.device) < lengths.unsqueeze(1)).unsqueeze(1) & (score > -INF).unsqueeze(2)
    parts = (torch.where(kept, symbol[states], NO_LABEL), torch.where(kept, begins, NO_LABEL), score.to(x.dtype))
    return FramePaths(*(each.squeeze(1) for each in parts)) if squeeze else FramePaths(*parts)


def best_alignment(x: Tensor, lengths: Tensor, graph: LabelGraph, labels: list[list[int]]) -> FramePaths:
    """Return the best path that spells each row's labels; every row has one."""
    B, T, _ = x.shape
    symbols = torch.full((B, T), NO_LABEL, dtype=torch.long)
    begins, scores = symbols.clone(), torch.zeros(B, dtype=torch.float64)
    for row, (each, length) in enumerate(zip(labels, lengths.tolist(), strict=True)):
        chain, skip, num = graph.band(each)
        if length and chain:
            states, score = _best_chain(x[row, :length].double().cpu().numpy()[:, chain], np.array(skip), num)
            scores[row] = score + graph.automaton.log_score(each)
            symbols[row, :length] = torch.tensor(chain)[states]
            step = 2 if graph.topology == "ctc" else graph.states_per_label
            entered = np.append(True, states[1:] != states[:-1]) & (
                states % step == (1 if graph.topology == "ctc" else 0)
            )
            spelt = (
                torch.tensor(each, dtype=torch.long)[states // step % max(1, len(each))]
                if each
                else torch.zeros(length)
            )
            begins[row, :length] = torch.where(torch.from_numpy(entered), spelt.long(), 0)
    return FramePaths(symbols, begins, scores)


def _best_chain(own: np.ndarray, skip: np.ndarray, num: int) -> tuple[np.ndarray, float]:
    """Return the best states on one chain [T, S], and their score."""
    T, S = own.shape
    d = np.where(np.arange(S) < num, own[0], -np.inf)
    back = np.zeros((T, S), dtype=np.int8)
    over = np.where(skip, 0.0, -np.inf)
    for t in range(1, T):
        one = np.concatenate([[-np.inf], d])[:S]
        two = np.concatenate([[-np.inf] * 2, d])[:S] + over
        all_three = np.stack([d, one, two])
        back[t] = all_three.argmax(0)
        d = all_three.max(0) + own[t]
    ends = np.arange(S) >= S - num
    state = int(np.where(ends, d, -np.inf).argmax())
    score, states = float(d[state]), np.zeros(T, dtype=np.int64)
    for t in range(T - 1, -1, -1):
        states[t] = state
        state -= int(back[t, state])
    return states, score


def sample(x: Tensor, lengths: Tensor, graph: LabelGraph, g: GraphTensors, num: int, rng: Rng) -> FramePaths:
    """Draw paths. Row b, draw n uses its own stream, whatever the batch around it."""
    B, T, _ = x.shape
    if not T:
        none = torch.zeros(B, num, 0, dtype=torch.long)
        return _frame_paths(x, lengths, graph, none, none, torch.zeros(B, num), squeeze=False)
    into, a = _ArcsInto.of(graph, x.device), graph_alphas(x, lengths, g)
    rows = rng.rows(B, num, T)
    states, arcs = (torch.zeros(B, num, T, dtype=torch.long, device=x.device) for _ in range(2))
    state, score = torch.zeros(B, num, dtype=torch.long), torch.zeros(B, num, dtype=torch.float64)
    width = max(into.arc.shape[1], graph.num_states)
    point = torch.full((B, num, width), -INF, dtype=torch.float64)
    point[:, :, 0] = 0.0  # what rows that have ended draw: one outcome
    for i in range(int(lengths.max()) if B else 0):
        t = lengths - 1 - i  # every row counts from its own end
        inside = (t >= 0).view(B, 1)
        here = a[t.clamp(min=0), torch.arange(B)]  # [B, S]
        if i == 0:
            log_p = (here + g.final).unsqueeze(1).expand(B, num, -1)
        else:
            arc = into.arc[state]  # [B, num, D]
            log_p = here.unsqueeze(1).expand(B, num, -1).gather(2, g.source[arc]) + g.log_weight[arc]
            log_p = torch.where(into.exists[state], log_p, -INF)
        log_p = torch.nn.functional.pad(log_p, (0, width - log_p.shape[2]), value=-INF)
        chosen = rows.categorical(torch.where(inside.unsqueeze(2), log_p, point))
        if i:
            arc = into.arc[state].gather(2, chosen.clamp(max=into.arc.shape[1] - 1).unsqueeze(2)).squeeze(2)
            after = (t + 1).clamp(min=0).view(B, 1, 1).expand(B, num, 1)
            arcs.scatter_(2, after, torch.where(inside, arc, arcs.gather(2, after).squeeze(2)).unsqueeze(2))
            score = score + torch.where(inside, g.log_weight[arc], 0.0)
            chosen = g.source[arc]
        else:
            score = score + torch.where(inside, g.final[chosen.clamp(max=graph.num_states - 1)], 0.0)
        state = torch.where(inside, chosen, state)
        place = t.clamp(min=0).view(B, 1, 1).expand(B, num, 1)
        states.scatter_(2, place, state.unsqueeze(2))
        own = x.double()[torch.arange(B), t.clamp(min=0)].unsqueeze(1).expand(B, num, -1)
        score = score + torch.where(inside, own.gather(2, g.symbol[state].unsqueeze(2)).squeeze(2), 0.0)
    score = score + torch.where((lengths > 0).view(B, 1), g.initial[states[:, :, 0]], 0.0)
    return _frame_paths(x, lengths, graph, states, arcs, score, squeeze=False)


def expected_score(x: Tensor, other: Tensor, lengths: Tensor, g: GraphTensors) -> Float[Tensor, " B"]:
    """Return E_{π ~ p(· | x)}[score_other(π)] = ∂/∂λ log Σ_π exp( score(π) + λ score_other(π) ) at λ = 0."""
    tilt = torch.zeros(len(x), dtype=torch.float64, device=x.device, requires_grad=True)
    with torch.enable_grad():
        finite = torch.where(other > -INF, other, 0.0).double()
        one = tilt.view(-1, 1)
        tilted = replace(
            g,
            log_weight=g.log_weight + one * g.log_weight,
            initial=_tilted(g.initial, one),
            final=_tilted(g.final, one),
        )
        log_z = graph_log_sum(x.double() + tilt.view(-1, 1, 1) * finite, lengths.clamp(min=1), tilted)
        found = torch.autograd.grad(log_z.sum(), tilt, create_graph=x.requires_grad or other.requires_grad)[0]
    if bool((other == -INF).any()):
        lost = (_marginals(x, lengths, g) > 0) & (other == -INF)
        found = torch.where(lost.flatten(1).any(1), -INF, found)
    return found


def _marginals(x: Tensor, lengths: Tensor, g: GraphTensors) -> Tensor:
    with torch.enable_grad():
        own = x.detach().double().requires_grad_()
        return torch.autograd.grad(graph_log_sum(own, lengths.clamp(min=1), g).sum(), own)[0]


def _tilted(weights: Tensor, tilt: Tensor) -> Tensor:
    return weights + tilt * torch.where(weights > -INF, weights, 0.0)
