"""Chains that look further back, by a state for every history.

    score(y) = Σ_t φ_t(y_t) + Σ_t A[y_{t−n}, …, y_{t−1}, y_t],        y_s = K for s < 1 (before the first position)

A state is (y_{t−n+1}, …, y_t); a state may follow another whose last n − 1 labels are its first. There are
K + K² + … + Kⁿ states, the shorter histories being those of the first positions, and a step costs their number squared:
this is for small K and n. Everything else is the ``LinearChain`` of these states.
"""

import itertools
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured import distribution
from freenergy.structured.allowed import Allowed
from freenergy.structured.chain import LinearChain
from freenergy.structured.distribution import NO_LABEL, Taggings
from freenergy.structured.positions import positions
from freenergy.structured.potentials import check_shape

MAX_STATES = 4096


@final
class HigherOrderChain:
    """A batch of chains of order n ≥ 1 over K labels.

    ``transitions`` has n axes of K + 1 and a last one of K; index K stands for "before the first position", so that
    ``transitions[K, …, K]`` is the start. ``allowed`` is about single labels and neighbours, as in ``LinearChain``.

    >>> chain = HigherOrderChain(torch.zeros(1, 5, 2), torch.zeros(3, 3, 2))  # order 2: all 32 taggings are equal
    >>> round(chain.log_partition().exp().item(), 3)
    32.0
    """

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor,
        *,
        end: Tensor | None = None,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        K, n = emissions.shape[-1], transitions.dim() - 1
        if emissions.dim() != 3 or n < 1 or list(transitions.shape) != [K + 1] * n + [K]:
            wanted = f"{[K + 1]} times the order, then {K}"
            raise UserError(f"transitions have the shape {list(transitions.shape)}: with {K} labels it is {wanted}")
        if sum(K**m for m in range(1, n + 1)) > MAX_STATES:
            raise UserError(f"order {n} over {K} labels has more than {MAX_STATES} states: lower the order")
        B, T, _ = emissions.shape
        check_shape("end", end, ((K,),))
        if allowed is not None:
            check_shape("allowed.labels", allowed.labels, ((B, T, K),))
            check_shape("allowed.pairs", allowed.pairs, ((K, K),))
        self._given = emissions, transitions, {"end": end, "lengths": lengths, "mask": mask}, allowed or Allowed()
        self.order, self.shape = n, (B, T, K)
        self._positions = positions(B, T, lengths, mask, emissions.device)
        histories = _histories(K, n)
        self._places = {history: i for i, history in enumerate(histories)}
        self._last = torch.tensor([history[-1] for history in histories], device=emissions.device)
        self._states = self._expanded(emissions, transitions, end, allowed or Allowed(), histories)

    def _expanded(
        self, x: Tensor, A: Tensor, end: Tensor | None, allowed: Allowed, histories: list[tuple[int, ...]]
    ) -> LinearChain:
        """Return the chain of states; a state's emission is that of its last label."""
        K, last, device = self.shape[2], self._last, x.device
        table = torch.tensor(histories, device=device)  # [S, n]
        follows = (table[:, None, 1:] == table[None, :, :-1]).all(-1)
        path = [table[:, i].unsqueeze(1).expand_as(follows) for i in range(self.order)]
        pairs = follows if allowed.pairs is None else follows & allowed.pairs[last][:, last]
        is_first = (table[:, :-1] == K).all(-1)
        return LinearChain(
            self._positions.pack(x)[..., last],
            A[(*path, last.expand_as(follows))],
            start=A[(K,) * self.order][last],
            end=None if end is None else end[last],
            lengths=self._positions.lengths,
            allowed=Allowed(
                pairs=pairs,
                start=is_first if allowed.start is None else is_first & allowed.start[last],
                end=None if allowed.end is None else allowed.end[last],
                labels=None if allowed.labels is None else self._positions.pack(allowed.labels)[..., last],
            ),
        )

    def log_partition(self) -> Float[Tensor, " B"]:
        """Return log Z; −inf where nothing is allowed."""
        return self._states.log_partition()

    def log_score(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return score(y), −inf where y is forbidden."""
        return self._states.log_score(self._to_states(y))

    def log_prob(self, y: Int[Tensor, "B *num T"]) -> Float[Tensor, " B *num"]:
        """Return log p(y)."""
        return self._states.log_prob(self._to_states(y))

    def marginals(self) -> Float[Tensor, "B T K"]:
        """Return p(y_t = k); 0 at masked positions."""
        of_state = self._states.marginals()
        return self._positions.unpack(of_state @ torch.nn.functional.one_hot(self._last, self.shape[2]).to(of_state))

    def pair_marginals(self) -> Float[Tensor, "B T1 K K"]:
        """Return p(y_s = j, y_t = k) at entry t − 1, where s is the kept position before t; 0 where there is none."""
        of_states = self._states.pair_marginals()
        last = torch.nn.functional.one_hot(self._last, self.shape[2]).to(of_states)
        return self._positions.unpack_steps(last.T @ of_states @ last)

    def condition(self, labels: Bool[Tensor, "B T K"]) -> "HigherOrderChain":
        """Return the chain given that every label is in its set: partial labels, forced decoding."""
        emissions, transitions, others, allowed = self._given
        return HigherOrderChain(emissions, transitions, **others, allowed=allowed.with_labels(labels))

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Return the log-probability that every label is in its set: the sum over all compatible taggings."""
        return distribution.partial_log_prob(self, labels, "tagging")

    def posterior_argmax(self) -> Int[Tensor, "B T"]:
        """Return the most probable label of each position."""
        return distribution.posterior_argmax(self.marginals(), self._positions.mask)

    def expectation(
        self, labels: Float[Tensor, "B T K"] | None = None, pairs: Float[Tensor, "*steps K K"] | None = None
    ) -> Float[Tensor, " B"]:
        """Return E[ Σ_t labels_t(y_t) + Σ_{t ≥ 2} pairs_t(y_{t−1}, y_t) ]."""
        return distribution.expectation(self, labels, pairs)

    def argmax(self) -> Taggings:
        """Return the most probable tagging of each row and its score."""
        best = self._states.argmax()
        return Taggings(self._to_labels(best.labels.unsqueeze(1)).squeeze(1), best.log_score)

    def top_k(self, k: int) -> Taggings:
        """Return the k most probable taggings of each row, best first."""
        best = self._states.top_k(k)
        return Taggings(self._to_labels(best.labels), best.log_score)

    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draw ``num`` independent taggings of each row."""
        return self._to_labels(self._states.sample(num, rng))

    def expected_log_score(self, other: "HigherOrderChain") -> Float[Tensor, " B"]:
        """Return E_{y ~ self}[other.log_score(y)]."""
        if other.order != self.order:
            raise UserError(f"chains of orders {self.order} and {other.order} cannot be compared: use one order")
        return self._states.expected_log_score(other._states)

    def entropy(self) -> Float[Tensor, " B"]:
        """Return H(p) in nats."""
        return distribution.entropy(self)

    def cross_entropy(self, other: "HigherOrderChain") -> Float[Tensor, " B"]:
        """Return −E_{y ~ self}[log p_other(y)]."""
        return distribution.cross_entropy(self, other)

    def kl(self, other: "HigherOrderChain") -> Float[Tensor, " B"]:
        """Return KL(self ‖ other)."""
        return distribution.kl(self, other)

    def _to_states(self, y: Tensor) -> Tensor:
        """Return the states of packed labels, in the shape of y."""
        B, T, K = self.shape
        packed = self._positions.pack(y.reshape(B, -1, T).transpose(1, 2)).transpose(1, 2)  # [B, num, T]
        packed = torch.where(self._positions.kept.unsqueeze(1), packed, 0)
        if packed.numel() and not 0 <= int(packed.min()) <= int(packed.max()) < K:
            raise UserError(f"a label is not in the tag set: labels run from 0 to {K - 1}")
        before = torch.nn.functional.pad(packed, (self.order - 1, 0), value=K)
        base = (K + 1) ** torch.arange(self.order - 1, -1, -1, device=y.device)
        codes = (before.unfold(-1, self.order, 1) * base).sum(-1)
        table = torch.zeros((K + 1) ** self.order, dtype=torch.long, device=y.device)
        known = torch.tensor(list(self._places), device=y.device)
        table[(known * base).sum(-1)] = torch.arange(len(known), device=y.device)
        return table[codes].view(y.shape)

    def _to_labels(self, states: Int[Tensor, "B num T"]) -> Int[Tensor, "B num T"]:
        labels = torch.where(states == NO_LABEL, NO_LABEL, self._last[states.clamp(min=0)])
        return self._positions.unpack_labels(labels)


def _histories(K: int, n: int) -> list[tuple[int, ...]]:
    """Return all states: n labels, of which the first ones may be K, before the first position."""
    shapes = ([K] * (n - m) for m in range(1, n + 1))
    return [(*empty, *some) for empty in shapes for some in itertools.product(range(K), repeat=n - len(empty))]
