"""Noise that was drawn before and is read from disk, the same draws each time; the law is that of their source."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, Model, Noise, NoiseState
from freenergy.core.sequences import Continuations
from freenergy.noise.store import NegativeStore


@final
class Stored:
    """The draws of a store; ``source`` is the noise that made them, without which their law is unknown."""

    kind = "stored"

    def __init__(self, store: NegativeStore, source: Noise | None = None) -> None:
        self.store, self.source = store, source

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: nothing is drawn."""
        return {}

    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Reads the first ``num`` negatives of each window; nothing random is left."""
        if num > self.store.per_prefix:
            raise UserError(
                f"{num} negatives per prefix were asked for, but {self.store.folder} holds {self.store.per_prefix}: "
                "set per_prefix higher and run the negatives stage again, or ask for less"
            )
        draws = self.store.draws(self.store.positions(data.rows), data.x.contexts)
        some = slice(0, num)
        return state, Draws(draws.x.candidates(some), draws.log_base[:, some], draws.log_proposal[:, some])

    def log_noise(self, x: Continuations) -> Float[Tensor, "B N"] | None:
        """Returns the log-probability under the source, or None where that is unknown."""
        return None if self.source is None else self.source.log_noise(x)
