"""Where negatives come from.

    x_1, …, x_K ~ q(· | c)        for every window with prefix c

The negatives of a window depend on the seed and on the window's own number, never on the batch around it.
``is_relative`` is True where q is not the base (truncated, tempered, infilled): the optimum of training is then
relative to that law.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Rows
from freenergy.core.roles import ANCESTRAL, Draws, LanguageModel, NegativeSource, Truncation
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.noise.store import NegativeStore


@final
class FromBase:
    """Fresh draws from a language model.

    ``together=False`` samples one window at a time, for models that draw somewhere else and take a seed a request.
    """

    kind = "base"

    def __init__(
        self, lm: LanguageModel, space: SequenceSpace, truncation: Truncation = ANCESTRAL, *, together: bool = True
    ) -> None:
        self.lm, self.space, self.truncation, self.together = lm, space, truncation, together

    @property
    def is_relative(self) -> bool:
        """True when q is truncated or tempered."""
        return not self.truncation.is_identity

    def draw(self, rows: Int[Tensor, " batch"], data: Continuations, num: int, rng: Rng) -> Draws:
        """``num`` continuations of each window's prefix."""
        numbers: list[int] = rows.tolist()
        runs = [slice(0, len(numbers))] if self.together else [slice(b, b + 1) for b in range(len(numbers))]
        parts = []
        for run in runs:
            stream = _stream(rng, numbers[run])
            parts.append(self.lm.sample(data.contexts[run], num, self.space, stream, self.truncation))
        return Draws.cat(parts, dim=0)


@final
class Mixed:
    """Several sources, each with its own number of negatives a window."""

    def __init__(self, parts: Sequence[tuple[NegativeSource, int]]) -> None:
        self.parts = tuple(parts)

    @property
    def is_relative(self) -> bool:
        """True when any part is relative."""
        return any(is_relative(source) for source, _ in self.parts)

    def draw(self, rows: Int[Tensor, " batch"], data: Continuations, num: int, rng: Rng) -> Draws:
        """The negatives of every part side by side; ``num`` is their sum."""
        total = sum(count for _, count in self.parts)
        if num != total:
            raise UserError(f"{num} negatives were asked for, but the sources give {total}: ask for {total}")
        draws = [source.draw(rows, data, count, rng.child("source", i)) for i, (source, count) in enumerate(self.parts)]
        return Draws.cat(draws, dim=1)


@final
class Stored:
    """Negatives that were drawn before; the same ones each time."""

    def __init__(self, store: NegativeStore) -> None:
        self.store = store

    @property
    def is_relative(self) -> bool:
        """True when any stored negative comes from another law than the base."""
        return self.store.is_relative

    def draw(self, rows: Int[Tensor, " batch"], data: Continuations, num: int, rng: Rng) -> Draws:
        """The first ``num`` negatives of each window; nothing random is left."""
        if num > self.store.per_prefix:
            raise UserError(
                f"{num} negatives a prefix were asked for, but {self.store.folder} holds {self.store.per_prefix}: "
                "set per_prefix higher and run the negatives stage again, or ask for less"
            )
        draws = self.store.draws(self.store.positions(rows), data.contexts)
        some = slice(0, num)
        return Draws(draws.x.candidates(some), draws.log_base[:, some], draws.log_proposal[:, some])


def is_relative(source: NegativeSource) -> bool:
    """Whether the optimum is relative to another law than the base; a source that does not say so is."""
    return bool(getattr(source, "is_relative", True))


def _stream(rng: Rng, numbers: list[int]) -> Rng:
    """The stream in which context b of a batch is the window ``numbers[b]``."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return rng.shift(contexts=numbers[0])
    return _Numbered(rng, numbers)


class _Numbered(Rng):
    """A stream for windows that do not follow one another."""

    def __init__(self, rng: Rng, numbers: list[int]) -> None:
        super().__init__(rng.seed, rng.path, rng.origin)
        self._rng, self._numbers = rng, numbers

    def shift(self, *, contexts: int = 0, candidates: int = 0) -> "_Numbered":
        return _Numbered(self._rng.shift(candidates=candidates), self._numbers[contexts:])

    def rows(self, contexts: int, candidates: int, draws: int) -> Rows:
        parts = [self._rng.shift(contexts=number).rows(1, candidates, draws) for number in self._numbers[:contexts]]
        return Rows(torch.cat([part._u for part in parts]))

    def child(self, *keys: int | str) -> Rng:
        # anything but rows would depend on the batch
        raise UserError("this language model draws from streams of its own: use FromBase(…, together=False)")

    def _numpy(self) -> Any:
        return self.child()
