"""Noise from several sources, each with its own number of negatives per window.

    q(x | c) = Σ_j (K_j / K) · q_j(x | c),      K = Σ_j K_j

Part j gives exactly K_j of the K negatives. ``log_proposal`` of a draw is that of its own part, log q_j; the law that
an objective needs is the mixture's, ``log_noise``.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, Model, Noise, NoiseState
from freenergy.core.sequences import Continuations


@final
class Mixture:
    """``parts`` are noises with the number of negatives that each gives to a window."""

    kind = "mixture"

    def __init__(self, parts: Sequence[tuple[Noise, int]]) -> None:
        self.parts = tuple(parts)

    def init(self, rng: Rng) -> NoiseState:
        """Returns the states of all parts, their keys numbered by part."""
        states = [noise.init(rng.child("source", i)) for i, (noise, _) in enumerate(self.parts)]
        return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}

    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws the negatives of every part, part after part; ``num`` must be their sum."""
        total = sum(count for _, count in self.parts)
        if num != total:
            raise UserError(f"{num} negatives were asked for, but the sources give {total}: ask for {total}")
        draws, states = [], NoiseState()
        for i, (noise, count) in enumerate(self.parts):
            own = {key.removeprefix(f"{i}."): value for key, value in state.items() if key.startswith(f"{i}.")}
            after, drawn = noise.draw(model, own, data, count, rng.child("source", i))
            states |= {f"{i}.{key}": value for key, value in after.items()}
            draws.append(drawn)
        return states, Draws.cat(draws, dim=1)

    def log_noise(self, x: Continuations) -> Float[Tensor, "B N"] | None:
        """Returns log Σ_j (K_j / K) q_j(x | c), or None where the law of a part is unknown."""
        total, terms = sum(count for _, count in self.parts), []
        for noise, count in self.parts:
            log_q = noise.log_noise(x)
            if log_q is None:
                return None
            terms.append(log_q + math.log(count / total))
        return torch.stack(terms).logsumexp(0)
