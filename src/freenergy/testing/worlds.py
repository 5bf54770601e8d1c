"""A tabular world: few enough strings that every sum can be written out.

    P(x | c) = q(x | c) · w(x) / Z,    w = exp(−E) if restricted to the proposal, P_LM / q · exp(−E) for the whole model

In float64, in plain Python where the package uses tensors: the oracle of samplers and estimators.
"""

import math
from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Energy, Target
from freenergy.core.scored import Law
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.tabular import TabularLM
from freenergy.models.residual import Residual
from freenergy.testing.enumerating import everything


@final
class World:
    """Strings of up to ``length`` tokens after one context, a base, and one energy per string; all their sums.

    >>> world = World(tokens=2, length=2)
    >>> world.names
    [(0,), (1, 0), (1, 1)]
    >>> round(world.law().sum().item(), 12)
    1.0
    """

    def __init__(
        self, tokens: int = 3, *, length: int = 2, eos: int | None = 0, spread: float = 1.0, seed: int = 3
    ) -> None:
        self.space = SequenceSpace(vocab_size=tokens, length=length, eos=eos)
        self.base = TabularLM.random(Rng(2), vocab_size=tokens, order=1)
        self.context = Sequences.from_lists([[1]])
        self.x = everything([[1]], self.space)
        self.names = [tuple(string) for string in self.x.lists()[0]]
        self.log_base = self.base.log_prob(self.x)[0]
        self.energies = spread * Rng(seed).normal(len(self.names))
        self.reads = 0

    def energy(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Look up E(x), whatever the context; ``reads`` counts the strings."""
        self.reads += x.shape[0] * x.shape[1]
        rows = [[self.energies[self.names.index(tuple(string))] for string in strings] for strings in x.lists()]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def model(self) -> Residual:
        """Return P(x | c) ∝ P_LM(x | c) exp(−E(x))."""
        return Residual(self.base, self.energy)

    def target(self, energy: Energy | None = None, *contexts: list[int]) -> Target[Residual]:
        """Return the target of samplers and estimators; after other contexts or with another energy where given."""
        after = Sequences.from_lists(contexts) if contexts else self.context
        return Target(Residual(self.base, energy) if energy else self.model, after, self.space)

    def log_partition(self) -> float:
        """Return log Z = log Σ_x P_LM(x) exp(−E(x))."""
        return float((self.log_base - self.energies).logsumexp(0))

    def proposal(self, truncation: Truncation = ANCESTRAL) -> Float[Tensor, " strings"]:
        """Return q of every string, token by token in plain Python."""
        return torch.tensor([self._chance(name, truncation) for name in self.names], dtype=torch.float64)

    def _chance(self, string: tuple[int, ...], truncation: Truncation) -> float:
        chance, written = 1.0, [1]
        for token in string:
            log_p = self.base.next_log_probs(Sequences.from_lists([written]))[0].tolist()
            mass = {v: math.exp(value / truncation.temperature) for v, value in enumerate(log_p)}
            ranked = sorted(mass, key=lambda v: -mass[v])[: truncation.top_k]
            total, kept, sum_kept = sum(mass[v] for v in ranked), [], 0.0
            for v in ranked:
                if sum_kept < (truncation.top_p or 1.0) * total:
                    kept.append(v)
                    sum_kept += mass[v]
            chance *= mass[token] / sum_kept if token in kept else 0.0
            written.append(token)
        return chance

    def weights(self, law: Law = "restricted", truncation: Truncation = ANCESTRAL) -> Float[Tensor, " strings"]:
        """Return w of every string; 0 where the proposal cannot draw it."""
        q, factor = self.proposal(truncation), (-self.energies).exp()
        full = self.log_base.exp() / q.clamp(min=1e-300) * factor
        return torch.where(q > 0, factor if law == "restricted" else full, 0.0)

    def law(self, law: Law = "restricted", truncation: Truncation = ANCESTRAL) -> Float[Tensor, " strings"]:
        """Return P of every string."""
        mass = self.proposal(truncation) * self.weights(law, truncation)
        return mass / mass.sum()

    def vector(self, law: Mapping[tuple[int, ...], float]) -> Float[Tensor, " strings"]:
        """Return a law over strings as a vector in the order of ``names``."""
        assert set(law) <= set(self.names), f"the law has strings outside {self.space}"
        return torch.tensor([law.get(name, 0.0) for name in self.names], dtype=torch.float64)


def total_variation(p: Tensor, q: Tensor) -> float:
    """Return TV(p, q) = ½ Σ |p − q|."""
    return float((p - q).abs().sum() / 2)
