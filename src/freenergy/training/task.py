"""What the training loop trains.

    step s = micro-batches 0 … A − 1, each chosen by (s, its number) alone,     loss = mean over them

A task may carry more state than weights from step to step. Every micro-batch of a step sees that state as it was when
the step began; at the end of the step the statistics of all micro-batches update it. So the order of the micro-batches
and the process that computes them make no difference.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.training.settings import Optimisation


@final
@dataclass(frozen=True, slots=True)
class Validation:
    """The held-out value that early stopping watches (lower is better), and the metrics that are reported with it."""

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
        """Returns the mean loss of one micro-batch; data are chosen by step and micro alone."""
        ...

    def validate(self) -> Validation:
        """Measures the module on held-out data."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A task that carries more than weights from step to step."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Returns live tensors: a checkpoint saves them, and restores them in place."""
        ...

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Update the state with the statistics of a step's losses, by name [micro-batches, …]."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A task whose weights do not all learn at the same rate."""

    def parameter_groups(self, settings: Optimisation) -> list[dict[str, Any]]:
        """Returns the groups of AdamW, as ``parameter_groups`` makes them."""
        ...


def parameter_groups(module: nn.Module, settings: Optimisation, *, rate: float = 1.0) -> list[dict[str, Any]]:
    """Returns the groups of a module's weights for AdamW; vectors (norms and biases) are not decayed.

    ``rate`` multiplies the learning rate of every step.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": settings.weight_decay, "rate": rate},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0, "rate": rate},
    ]


@final
class Shuffled:
    """The numbers of ``count`` windows, batch by batch: a new order every epoch, whole batches only.

    The order of an epoch is drawn by its number alone, so nothing has to be saved to resume. It is drawn once per
    epoch, since with many windows that takes longer than a step.
    """

    def __init__(self, count: int, steps: Optimisation, rng: Rng) -> None:
        self._count, self._batch, self._rng = count, steps.batch_size, rng
        self._size = steps.batch_size // steps.accumulate
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __call__(self, step: int, micro: int) -> Int[Tensor, " size"]:
        """Those of a micro-batch; steps count from 1."""
        epoch, place = divmod(step - 1, self._count // self._batch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._rng.child("epoch", epoch).permutation(self._count)
        first = place * self._batch + micro * self._size
        return self._order[first : first + self._size]
