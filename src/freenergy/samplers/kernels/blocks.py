"""Block Gibbs by a model that knows its own blocks: the colours of a lattice, the layers of a machine.

x_A ~ P(· | x_B),   x_B ~ P(· | x_A),      A and B together are all sites, and given the other each is independent
"""

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Continuations
from freenergy.samplers.kernels.gibbs import GibbsInfo, GibbsState


@runtime_checkable
class BlockModel(Protocol):
    """A model that can redraw all its sites block by block (``models.ising``, ``models.rbm``)."""

    def sweep(self, x: Continuations, rng: Rng) -> Continuations:
        """Redraw every block of every chain given the others, leaving the model invariant."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGibbs:
    """One sweep per step; for models that have one."""

    def init(self, target: Target[Model], x: Continuations) -> GibbsState:
        """Start chains at given positions [1, chains]."""
        if not isinstance(target.model, BlockModel):
            raise UserError(f"the model {type(target.model).__name__} has no blocks of its own: choose gibbs")
        return GibbsState(x)

    def step(self, target: Target[Model], state: GibbsState, rng: Rng) -> tuple[GibbsState, GibbsInfo]:
        """Redraw all blocks of every chain."""
        assert isinstance(target.model, BlockModel)
        x = target.model.sweep(state.x, rng.child("sweep"))
        return GibbsState(x), GibbsInfo(torch.ones(x.shape[1], dtype=torch.bool), 0)
