"""The Ising model on a square lattice, with exact sums where they can be had.

    log_score(x) = β ( J Σ_{i~j} x_i x_j + H Σ_i x_i ),      x_i in {−1, +1},      i~j neighbours (Eq. 2.10 of Ou 2024)
    P(x_i = +1 | rest) = 1 / (1 + exp(−2β (J Σ_{j~i} x_j + H)))

Edges end at the border (``boundary = "open"``) or go round (``"periodic"``). Spins are tokens: 0 is −1, 1 is +1, row by
row, so that every kernel of tokens can move them. Two colours of a checkerboard are independent given each other:

    sweep:   all sites with i + j even given the odd ones, then all odd ones given the even ones

which needs an even side where the boundary is periodic. log Z is exact by a transfer matrix over rows, and means are
exact by enumeration up to side 4.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace

_LARGEST = {"open": 14, "periodic": 10}  # sides whose transfer matrix is small enough
_ENUMERABLE = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ising:
    """P(x) ∝ exp(log_score(x)).

    >>> round(Ising(side=2, beta=0.2).log_partition(), 6)
    2.853578
    """

    side: int
    beta: float
    coupling: float = 1.0
    field: float = 0.0
    boundary: Literal["open", "periodic"] = "open"

    def __post_init__(self) -> None:
        check_range(self, "side", at_least=2)
        check_range(self, "beta", at_least=0, hint=" (1 / temperature)")
        check_range(self, "coupling", "field")

    @classmethod
    def at_temperature(cls, temperature: float, **settings: float | int | str) -> "Ising":
        """Return the model with β = 1/T.

        >>> Ising.at_temperature(2.5, side=4).beta
        0.4
        """
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature is {temperature}: set it above 0; at 0 only the ground states are left")
        return cls(beta=1 / temperature, **settings)  # type: ignore[arg-type]

    @property
    def space(self) -> SequenceSpace:
        """All configurations, as strings of side² tokens."""
        return SequenceSpace(vocab_size=2, length=self.side**2)

    def spins(self, x: Continuations) -> Float[Tensor, "B N side side"]:
        """Return −1 and +1 on the lattice."""
        if x.tokens.shape[2] != self.side**2:
            raise UserError(f"{x.tokens.shape[2]} spins for a lattice of {self.side}²: give one token per site")
        spins: Tensor = 2.0 * x.tokens.double().unflatten(2, (self.side, self.side)) - 1
        return spins

    def neighbours(self, spins: Float[Tensor, "*n side side"]) -> Float[Tensor, "*n side side"]:
        """Return the sum of the neighbouring spins of every site."""
        total = torch.zeros_like(spins)
        for dim in (-1, -2):
            for shift in (1, -1):
                moved = spins.roll(shift, dim)
                if self.boundary == "open":
                    moved = moved.clone()
                    moved.select(dim, 0 if shift == 1 else -1).zero_()
                total = total + moved
        return total

    def edges(self, spins: Float[Tensor, "*n side side"]) -> Float[Tensor, "*n"]:
        """Return Σ_{i~j} x_i x_j, every edge once."""
        return (spins * self.neighbours(spins)).sum((-1, -2)) / 2

    @property
    def num_edges(self) -> int:
        """The number of pairs of neighbours."""
        return 2 * self.side * (self.side - (self.boundary == "open"))

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """β (J Σ x_i x_j + H Σ x_i), not normalised."""
        spins = self.spins(x)
        return self.beta * (self.coupling * self.edges(spins) + self.field * spins.sum((-1, -2)))

    def local(self, spins: Float[Tensor, "*n side side"]) -> Float[Tensor, "*n side side"]:
        """Return β (J Σ_{j~i} x_j + H), half the log-odds of +1 at every site given the rest."""
        return self.beta * (self.coupling * self.neighbours(spins) + self.field)

    def site_scores(self, x: Continuations, site: Int[Tensor, " chains"]) -> Float[Tensor, "chains 2"]:
        """log_score with −1 and +1 at the site, up to a constant per chain: one local field instead of two readings."""
        local = self.local(self.spins(x))[0].flatten(1).gather(1, site.unsqueeze(1))
        return torch.cat([-local, local], dim=1)

    def slope(self, x: Continuations) -> Float[Tensor, "chains L 2"]:
        """∂ log_score by one-hot tokens."""
        local = self.local(self.spins(x))[0].flatten(1)
        return torch.stack([-local, local], dim=2)

    @torch.no_grad()
    def sweep(self, x: Continuations, rng: Rng, *, scale: float = 1.0, backward: bool = False) -> Continuations:
        """Draw both colours in turn, each given the other; ``scale`` multiplies β, ``backward`` turns the order."""
        self.check_colours()
        spins, K = self.spins(x)[0], x.shape[1]
        rows, even = rng.rows(1, K, self.side**2), self.colour()
        for is_own in (~even, even) if backward else (even, ~even):
            log_odds = 2 * scale * self.local(spins)
            for i, j in is_own.nonzero().tolist():
                sides = torch.stack([torch.zeros(K, dtype=torch.float64), log_odds[:, i, j]], dim=-1)
                spins[:, i, j] = 2.0 * rows.categorical(sides.unsqueeze(0))[0] - 1
        tokens = (spins.flatten(1) > 0).long().unsqueeze(0)
        return Continuations(x.contexts, tokens, x.lengths)

    def colour(self) -> Bool[Tensor, "side side"]:
        """True where i + j is even."""
        place = torch.arange(self.side)
        return (place.unsqueeze(1) + place) % 2 == 0

    def check_colours(self) -> None:
        """Refuse a lattice that has no two colours."""
        if self.boundary == "periodic" and self.side % 2:
            raise UserError(
                f"a periodic lattice of side {self.side} has no checkerboard: choose an even side, an open boundary "
                "or gibbs"
            )

    def start(self, num: int, rng: Rng) -> Continuations:
        """Draw configurations at β = 0: every spin by a fair coin."""
        rows = rng.rows(1, num, self.side**2)
        coins = [rows.categorical(torch.zeros(1, num, 2)) for _ in range(self.side**2)]
        lengths = torch.full((1, num), self.side**2)
        return Continuations(Sequences.from_lists([[]]), torch.stack(coins, dim=2), lengths)

    def log_partition(self) -> float:
        """log Z, exact, by a transfer matrix over rows of 2^side states; float64."""
        n, most = self.side, _LARGEST[self.boundary]
        if n > most:
            raise UserError(f"exact sums reach side {most}, not {n} ({self.boundary}): estimate log Z (IsingPath)")
        rows = 2.0 * ((torch.arange(2**n).unsqueeze(1) >> torch.arange(n)) & 1).double() - 1
        inside = (rows[:, :-1] * rows[:, 1:]).sum(1) + (rows[:, 0] * rows[:, -1] if self.boundary == "periodic" else 0)
        log_row = self.beta * (self.coupling * inside + self.field * rows.sum(1))
        log_pair = self.beta * self.coupling * (rows @ rows.T)
        if self.boundary == "open":
            total = log_row
            for _ in range(n - 1):
                top = total.max()
                total = (log_pair.exp() @ (total - top).exp()).log() + top + log_row
            return float(total.logsumexp(0))
        half = log_row / 2
        values = torch.linalg.eigvalsh((log_pair + half.unsqueeze(1) + half).exp())
        top = values.abs().max()
        return float(n * top.log() + (values / top).pow(n).sum().log())

    def exact(self) -> dict[str, float]:
        """Return log Z and means by enumeration: of Σ x_i x_j over edges, per edge, and of |magnetisation| per site."""
        if self.side > _ENUMERABLE:
            raise UserError(f"means by enumeration reach side {_ENUMERABLE}, not {self.side}: sample them")
        strings = self.space.enumerate()
        x = Continuations(Sequences.from_lists([[]]), strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
        log_score, spins = self.log_score(x)[0], self.spins(x)[0]
        p, edges = log_score.softmax(0), self.edges(spins)
        return {
            "log_partition": float(log_score.logsumexp(0)),
            "edges": float(p @ edges),
            "correlation": float(p @ edges) / self.num_edges,
            "abs_magnetisation": float(p @ spins.mean((-1, -2)).abs()),
        }


@final
@dataclass(frozen=True, slots=True)
class IsingPath:
    """From fair coins to the lattice, for annealed importance sampling: f(x, s) = exp(s · log_score(x))."""

    model: Ising

    @property
    def log_partition_start(self) -> float:
        """N log 2."""
        return self.model.side**2 * math.log(2)

    def start(self, num: int, rng: Rng) -> Continuations:
        """Draw fair coins."""
        return self.model.start(num, rng)

    def log_increase(self, x: Continuations, low: float, high: float) -> Float[Tensor, " chains"]:
        """(high − low) · log_score(x)."""
        return (high - low) * self.model.log_score(x)[0]

    def step(self, x: Continuations, beta: float, rng: Rng, *, backward: bool) -> Continuations:
        """Sweep once at this share of β."""
        return self.model.sweep(x, rng, scale=beta, backward=backward)
