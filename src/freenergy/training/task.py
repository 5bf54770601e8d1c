"""What the training loop trains.

    step s = micro-batches 0 … A − 1, each chosen by (s, its number) alone,     loss = mean over them

A task may carry more than weights from step to step. Every micro-batch of a step sees that state as it was when the
step began; at the step's end it takes in what all of them have told. So it does not matter in which order or where they
were done.
"""

from dataclasses import dataclass, field
from typing import Protocol, final, runtime_checkable

from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.core.roles import Loss


@final
@dataclass(frozen=True, slots=True)
class Validation:
    """The held-out value that early stopping watches, lower is better; and what a person wants to know beside it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """What is trained: a module, its loss on a micro-batch, and a number that should fall."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are optimised."""
        ...

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """The mean loss of one micro-batch; data are chosen by step and micro alone."""
        ...

    def validate(self) -> Validation:
        """How good the module is on held-out data."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A task that carries more than weights from step to step."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Live tensors: a checkpoint keeps them, and fills them again."""
        ...

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Take in what the losses of a step have told, by name [micro-batches, …]."""
        ...
