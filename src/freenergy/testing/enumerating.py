"""An Rng that walks every branch, so that a sampler's law is known exactly; and every string of a space.

    law(y) = Σ over branches with result y of Π (probability of each choice made)

The function under test runs once per branch: a script of choices is replayed, the first open choice takes its next
option, and the branch's probability is the product of what was chosen. No statistics, no tolerance beyond rounding.
The cost is one run per branch, so keep the space below about ten thousand branches.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng, Rows
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace

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
