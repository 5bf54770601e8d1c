"""A network that maps a context to logits, and the rows that it learns from.

    q(x | g) = Π_t softmax(f(· ; g, x_<t))[x_t],        f = the logits

g is what every row is given: the token before a block of text, a sentence to translate, nothing for an image.
``training.tasks.autoregressive`` trains every such network on every such source of rows.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.rng import Rng


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of data. ``known`` is how many first tokens of each row a fake row shares with it."""

    given: Any  # what the network's ``logits`` and ``draw`` take
    tokens: Int[Tensor, "rows T"]
    mask: Bool[Tensor, "rows T"]  # the tokens that count; those of a row come first
    known: int = 0


@runtime_checkable
class Network(Protocol):
    """q(x | g)."""

    @property
    def module(self) -> nn.Module:
        """Return what is trained."""

    @property
    def vocab_size(self) -> int:
        """Return V."""

    def logits(self, given: Any, tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Compute the logits of each token t given g and tokens 0 … t − 1; T may be less than the length of a row."""

    def draw(
        self, given: Any, known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draw at most ``length`` tokens after the known ones from q; return them and which of them count."""


@runtime_checkable
class Data(Protocol):
    """Where rows come from."""

    @property
    def epoch_steps(self) -> int:
        """Return the optimiser steps in which every row is read about once."""

    def batch(self, step: int, micro: int) -> Batch:
        """Return the rows of a micro-batch of step 1, 2, …: chosen by these two numbers and the seed alone."""

    def held_out(self) -> Iterator[Batch]:
        """Return the validation rows, in order."""


@runtime_checkable
class Recurrent(Protocol):
    """A network that sees what it has read in earlier steps."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the memory, live: a checkpoint keeps it, and fills it again."""

    def remember(self) -> None:
        """Take the rows that were read first since the last call into the memory."""

    def forget(self) -> None:
        """Reset."""

    def apart(self) -> AbstractContextManager[None]:
        """Within this block other rows are read from their beginning."""


@runtime_checkable
class Lanes(Protocol):
    """Data whose rows continue where those of the previous step ended."""

    def is_first(self, step: int) -> bool:
        """Return whether nothing comes before the rows of this step."""
