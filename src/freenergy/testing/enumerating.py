"""Everything that can happen: every branch of a sampler's randomness, every string of a space, every sum of a world.

    law(y) = Σ over branches with result y of Π (probability of each choice made)
    P(x | c) = q(x | c) · w(x) / Z,    w = exp(−E) if restricted to the proposal, P_LM / q · exp(−E) for the whole model

The function under test runs once per branch: a script of choices is replayed, the first open choice takes its next
option, and the branch's probability is the product of what was chosen. No statistics, no tolerance beyond rounding.
The cost is one run per branch, so keep the space below about ten thousand branches. ``World`` is in plain Python where
the package uses tensors: the oracle of samplers and estimators.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng, Rows
from freenergy.core.roles import Energy, Target
from freenergy.core.scored import Law
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.tabular import TabularLM
from freenergy.models.residual import Residual

Lists = Sequence[Sequence[int]]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Choice:
    options: list[int]
    probs: list[float]
    taken: int = 0


class EnumeratingRng(Rng):
    """Replays a script of choices; every categorical draw of every row is one choice."""

    def __init__(self, script: list[_Choice]) -> None:
        super().__init__(0)
        self._script = script
        self._place = 0
        self.probability = 1.0

    def categorical(self, log_probs: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
        """Take the scripted option of each row in turn."""
        probs = log_probs.double().softmax(-1)
        chosen = [self._choose(row) for row in probs.reshape(-1, probs.shape[-1])]
        return torch.tensor(chosen, dtype=torch.long).view(probs.shape[:-1])

    def _choose(self, probs: Tensor) -> int:
        if self._place == len(self._script):
            options = probs.nonzero().flatten().tolist()
            self._script.append(_Choice(options, probs[options].tolist()))
        choice = self._script[self._place]
        self._place += 1
        self.probability *= choice.probs[choice.taken]
        return choice.options[choice.taken]

    def child(self, *keys: int | str) -> "EnumeratingRng":
        """Return self: every stream is part of the same walk."""
        return self

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "EnumeratingRng":
        """Return self: every stream is part of the same walk."""
        return self

    def rows(self, contexts: int, candidates: int, draws: int) -> Rows:
        """Return rows whose draws are choices of this walk."""
        return _EnumeratingRows(self)

    def uniform(self, *shape: int) -> Tensor:
        """Raise: a continuum of branches cannot be walked."""
        raise NotImplementedError("uniform numbers cannot be enumerated: draw through categorical or bernoulli")

    def normal(self, *shape: int) -> Tensor:
        """Raise: a continuum of branches cannot be walked."""
        raise NotImplementedError("normal numbers cannot be enumerated: test this sampler statistically")

    def permutation(self, size: int) -> Int[Tensor, " size"]:
        """Choose one of size! orders, element by element."""
        left = list(range(size))
        return torch.tensor([left.pop(int(self.categorical(torch.zeros(len(left))))) for _ in range(size)])

    def integer(self) -> int:
        """Raise: a seed for another generator cannot be walked."""
        raise NotImplementedError("a seed cannot be enumerated: draw through categorical or bernoulli")


class _EnumeratingRows(Rows):
    def __init__(self, rng: EnumeratingRng) -> None:
        self._rng = rng

    def categorical(self, log_probs: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
        return self._rng.categorical(log_probs)

    def joined(self, others: Sequence[Rows]) -> Rows:
        return self  # one walk for all of them

    def normal(self, num: int) -> Tensor:
        raise NotImplementedError("normal numbers cannot be enumerated: test this sampler statistically")

    def numbers(self, draw: int) -> None:
        return None


def branches(function: Callable[[Rng], T]) -> Iterator[tuple[float, T]]:
    """Yield every branch of a function of an Rng: its probability and its result."""
    script: list[_Choice] = []
    while True:
        rng = EnumeratingRng(script)
        result = function(rng)
        yield rng.probability, result
        while script and script[-1].taken + 1 == len(script[-1].options):
            script.pop()
        if not script:
            return
        script[-1].taken += 1


def law(function: Callable[[Rng], T], key: Callable[[T], K]) -> dict[K, float]:
    """Return the exact distribution of ``key(function(rng))``.

    >>> law(lambda rng: rng.bernoulli(torch.tensor([0.5, 0.5])), lambda coins: int(coins.sum()))
    {0: 0.25, 1: 0.5, 2: 0.25}
    """
    total: dict[K, float] = {}
    for probability, result in branches(function):
        total[key(result)] = total.get(key(result), 0.0) + probability
    return total


def everything(contexts: Lists, space: SequenceSpace) -> Continuations:
    """Return every string of the space as a continuation of each context."""
    strings, B = space.enumerate(), len(contexts)
    tokens = strings.tokens.expand(B, *strings.tokens.shape)
    return Continuations(Sequences.from_lists(contexts), tokens, strings.lengths.expand(B, -1))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, claim: str) -> None:
    """Raise an AssertionError that names the claim and its error; −∞ on both sides is equal."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    both_impossible = (found == -math.inf) & (wanted == -math.inf)
    gap = torch.where(both_impossible, 0, (found - wanted).abs())
    worst = float(gap.max()) if gap.numel() else 0.0
    assert worst <= tolerance, f"{claim}: off by {worst:.2e}, more than {tolerance:.0e}"


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
        return as_vector(law, self.names)


def as_vector(law: Mapping[tuple[int, ...], float], names: list[tuple[int, ...]]) -> Float[Tensor, " strings"]:
    """Return a law over strings as a vector in the order of ``names``, which must be all strings that it has."""
    assert set(law) <= set(names), f"{sorted(set(law) - set(names))[:3]} are outside of the space"
    return torch.tensor([law.get(name, 0.0) for name in names], dtype=torch.float64)


def total_variation(p: Tensor, q: Tensor) -> float:
    """Return TV(p, q) = ½ Σ |p − q|."""
    return float((p - q).abs().sum() / 2)
