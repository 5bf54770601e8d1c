"""Label sequences of frames without alignments: CTC, CTC-CRF and LF-MMI as one distribution.

    p(π | x) = exp score(π) / Z,     score(π) = log p(y) + Σ_t x_t(π_t),  y = labels of π,     Z = Σ_π exp score(π)
    p(y | x) = Σ_{π spells y} p(π | x),        ∂ log p(y | x) / ∂x_t(c) = p(π_t = c | x, y) − p(π_t = c | x)

x_t(c) are potentials of symbols, normalised or not: their gradient is true either way.
(``torch.nn.functional.ctc_loss`` gives a gradient that is right only behind log_softmax.) With every label sequence of
weight 1 and normalised potentials, Z = 1 and this is CTC. A label sequence that cannot be spelt, or that the graph
forbids, has log p(y | x) = −inf and gradient 0.
"""

from collections.abc import Sequence
from functools import cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured import label_paths
from freenergy.structured.distribution import NO_LABEL
from freenergy.structured.graph_sums import GraphTensors, bands, summed_bands, summed_graph
from freenergy.structured.label_automaton import LabelAutomaton
from freenergy.structured.label_graph import LabelGraph
from freenergy.structured.label_paths import FramePaths

INF = float("inf")


def padded_labels(labels: Sequence[Sequence[int]]) -> Int[Tensor, "B U"]:
    """Return label sequences of different lengths as one tensor, NO_LABEL behind their ends.

    >>> padded_labels([[3, 1], [2]]).tolist()
    [[3, 1], [2, -1]]
    """
    width = max(map(len, labels), default=0)
    return torch.tensor([[*each, *[NO_LABEL] * (width - len(each))] for each in labels], dtype=torch.long).view(
        len(labels), width
    )


def label_lists(y: Int[Tensor, "B U"]) -> list[list[int]]:
    """Return the label sequences of a padded tensor."""
    return [[v for v in row if v != NO_LABEL] for row in y.tolist()]


@final
class LabelPaths:
    """p(π | x) over the paths of a graph, and p(y | x) over the label sequences that they spell.

    ``potentials`` are [B, T, C] with C = ``graph.num_symbols``; ``lengths`` [B] say how many frames count. Label
    sequences y are [B, U] or [B, num, U], padded with NO_LABEL (``padded_labels``).

    >>> p = torch.tensor([[.5, .3, .2], [.2, .5, .3], [.4, .1, .5]], dtype=torch.float64)
    >>> ctc = LabelPaths(p.log()[None], LabelGraph.ctc(LabelAutomaton.free(2)))
    >>> round(ctc.log_prob(padded_labels([[1, 2]])).exp().item(), 12)
    0.311
    """

    def __init__(
        self, potentials: Tensor, graph: LabelGraph, *, lengths: Tensor | None = None, compiled: bool = True
    ) -> None:
        if potentials.dim() != 3 or potentials.shape[2] != graph.num_symbols:
            raise UserError(
                f"potentials have the shape {list(potentials.shape)}: give [sequences, frames, {graph.num_symbols}]"
            )
        B, T, _ = potentials.shape
        lengths = torch.full((B,), T) if lengths is None else lengths.detach()
        if lengths.shape != (B,) or (B and not 0 <= int(lengths.min()) <= int(lengths.max()) <= T):
            raise UserError(f"lengths are {lengths.tolist()}: give one for each of {B} sequences, from 0 to {T}")
        self.potentials, self.graph, self.lengths = potentials, graph, lengths.to(potentials.device).long()
        self._compiled = compiled
        self._tensors = GraphTensors.of(graph, potentials.device)
        self._refuse_bad_numbers()

    def log_partition(self) -> Float[Tensor, " B"]:
        """Return log Z; −inf where the graph has no path of that many frames."""
        has_frames = self.lengths > 0
        if not len(self.potentials) or not bool(has_frames.any()):
            return self._without_frames()
        found = summed_graph(self.potentials, self.lengths.clamp(min=1), self._tensors, self._compiled)
        return found if bool(has_frames.all()) else torch.where(has_frames, found, self._without_frames())

    def log_score(self, y: Int[Tensor, "B *num U"]) -> Float[Tensor, " B *num"]:
        """Return log Σ_{π spells y} exp score(π), which includes log p(y) of the graph; −inf where y is impossible."""
        if y.dim() == 3:
            return torch.stack([self.log_score(y[:, n]) for n in range(y.shape[1])], 1)
        labels = label_lists(y)
        self._check_labels(labels)
        log_p = torch.tensor([self.graph.automaton.log_score(each) for each in labels], dtype=torch.float64)
        reasons = self._reasons(labels, log_p)
        possible = torch.tensor([each is None for each in reasons], dtype=torch.bool, device=self.potentials.device)
        log_p = log_p.to(self.potentials)
        if not bool(possible.any()):
            return self.potentials.new_full((len(labels),), -INF)
        rows = (possible & (self.lengths > 0)).nonzero().flatten()
        value = torch.where(possible, torch.zeros_like(log_p), -INF)
        if len(rows):
            chains = bands(self.graph, [labels[i] for i in rows.tolist()], self.potentials.device)
            x = self.potentials if len(rows) == len(labels) else self.potentials[rows]
            value = value.index_copy(0, rows, summed_bands(x, self.lengths[rows], chains, self._compiled))
        return torch.where(possible, log_p, 0.0) + value

    def log_prob(self, y: Int[Tensor, "B *num U"]) -> Float[Tensor, " B *num"]:
        """Return log p(y | x) = log_score(y) − log Z; −inf with gradient 0 where y is impossible."""
        score, log_z = self.log_score(y), self._log_partition_of_paths()
        return torch.where(score > -INF, score - log_z.view(-1, *[1] * (y.dim() - 2)), -INF)

    def loss(self, y: Int[Tensor, "B U"]) -> Float[Tensor, " B"]:
        """Return −log p(y | x), or refuse a label sequence that is impossible, saying why."""
        for reason in self.reasons(y):
            if reason is not None:
                raise UserError(reason)
        return -self.log_prob(y)

    def reasons(self, y: Int[Tensor, "B U"]) -> list[str | None]:
        """Return in words why a label sequence is impossible; None where it is not."""
        labels = label_lists(y)
        self._check_labels(labels)
        return self._reasons(labels, torch.tensor([self.graph.automaton.log_score(each) for each in labels]))

    def marginals(self, y: Int[Tensor, "B U"] | None = None) -> Float[Tensor, "B T C"]:
        """Return p(π_t = c | x), or p(π_t = c | x, y) given label sequences; 0 beyond a row's end."""
        with torch.enable_grad():
            x = self.potentials.detach().requires_grad_()
            own = LabelPaths(x, self.graph, lengths=self.lengths, compiled=self._compiled)
            total = own.log_partition() if y is None else own.log_score(y)
            total = torch.where(total > -INF, total, 0.0).sum()
            return (
                torch.autograd.grad(total, x, materialize_grads=True)[0] if total.requires_grad else torch.zeros_like(x)
            )

    def best_path(self) -> FramePaths:
        """Return the most probable path of each row (Viterbi) and what it spells."""
        return label_paths.best_path(self.potentials.detach(), self.lengths, self.graph, self._tensors)

    def align(self, y: Int[Tensor, "B U"]) -> FramePaths:
        """Return the most probable path that spells y; refuse where there is none."""
        self.loss(y)
        return label_paths.best_alignment(self.potentials.detach(), self.lengths, self.graph, label_lists(y))

    def sample(self, num: int, rng: Rng) -> FramePaths:
        """Draw ``num`` independent paths of each row, exactly, with what they spell: symbols [B, num, T]."""
        self._log_partition_of_paths()
        return label_paths.sample(self.potentials.detach(), self.lengths, self.graph, self._tensors, num, rng)

    def entropy(self) -> Float[Tensor, " B"]:
        """Return the entropy of the paths, −Σ_π p(π | x) log p(π | x), in nats."""
        return self.cross_entropy(self)

    def cross_entropy(self, other: "LabelPaths") -> Float[Tensor, " B"]:
        """Return −E_{π ~ self}[log p_other(π)]; both have one graph and one set of lengths."""
        if other.graph is not self.graph or not torch.equal(other.lengths, self.lengths):
            raise UserError("paths of different graphs or lengths cannot be compared: give both the same graph")
        self._log_partition_of_paths()
        expected = label_paths.expected_score(self.potentials, other.potentials, self.lengths, self._tensors)
        expected = torch.where(self.lengths > 0, expected, self._without_frames().double())
        return other.log_partition() - expected.to(self.potentials.dtype)

    def kl(self, other: "LabelPaths") -> Float[Tensor, " B"]:
        """Return KL(self ‖ other) between paths."""
        return self.cross_entropy(other) - self.entropy()

    def _without_frames(self) -> Float[Tensor, " B"]:
        """Return log Z of rows of no frames: the empty label sequence has one path, the empty one."""
        empty = self.graph.automaton.log_score([])
        return self.potentials.new_full((len(self.potentials),), empty)

    def _log_partition_of_paths(self) -> Float[Tensor, " B"]:
        log_z = self.log_partition()
        closed = log_z.detach() == -INF
        if bool(closed.any()):
            row = int(closed.int().argmax())
            raise UserError(f"no path of sequence {row} is allowed: give it more frames or loosen the graph")
        return log_z

    def _check_labels(self, labels: list[list[int]]) -> None:
        if len(labels) != len(self.potentials):
            raise UserError(f"{len(labels)} label sequences are given for {len(self.potentials)} rows: give one each")
        for row, each in enumerate(labels):
            strange = [v for v in each if not 1 <= v <= self.graph.num_labels]
            if strange:
                alphabet = f"labels run from 1 to {self.graph.num_labels}"
                raise UserError(f"label {strange[0]} of sequence {row} is not in the alphabet: {alphabet}")

    def _reasons(self, labels: list[list[int]], log_p: Tensor) -> list[str | None]:
        reasons: list[str | None] = []
        for row, (each, length) in enumerate(zip(labels, self.lengths.tolist(), strict=True)):
            needs = self.graph.num_frames(each)
            if length < needs or (length and self.graph.topology == "hmm" and not each):
                remedy = "shorten it or reduce subsampling"
                reasons.append(f"label sequence {row} needs {needs} frames or more and has {length}: {remedy}")
            elif log_p[row] == -INF:
                reasons.append(
                    f"label sequence {row} is forbidden by the label automaton: add it to its lexicon or counts"
                )
            else:
                reasons.append(None)
        return reasons

    def _refuse_bad_numbers(self) -> None:
        inside = torch.arange(self.potentials.shape[1], device=self.potentials.device) < self.lengths.unsqueeze(1)
        x = self.potentials.detach()
        if not bool((x.amax() < INF) if x.numel() else True):  # NaN compares false too
            wrong = (~(x < INF).all(-1) & inside).any(1)
            if bool(wrong.any()):
                raise UserError(
                    f"potentials of sequence {int(wrong.int().argmax())} contain NaN or +inf: check the network"
                )
            self.potentials = torch.where(inside.unsqueeze(-1), self.potentials, 0.0)


def ctc_log_score(
    potentials: Float[Tensor, "B T C"], y: Int[Tensor, "B U"], lengths: Tensor | None = None, *, compiled: bool = True
) -> Float[Tensor, " B"]:
    """Return log Σ_{π spells y} exp Σ_t x_t(π_t): log p(y | x) of CTC where potentials are log-probabilities."""
    graph = free_ctc(potentials.shape[2] - 1)
    return LabelPaths(potentials, graph, lengths=lengths, compiled=compiled).log_score(y)


@cache
def free_ctc(num_labels: int) -> LabelGraph:
    """Return the CTC graph in which every label sequence weighs 1."""
    return LabelGraph.ctc(LabelAutomaton.free(num_labels))
