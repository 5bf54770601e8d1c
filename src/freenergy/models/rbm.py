"""The restricted Boltzmann machine, with exact sums where one layer is small.

    E(v, h) = −v'Wh − b'v − a'h,      v in {0, 1}^D,  h in {0, 1}^H,      P(v, h) = exp(−E)/Z
    P(h_j = 1 | v) = σ(a_j + Σ_i v_i W_ij),      P(v_i = 1 | h) = σ(b_i + Σ_j W_ij h_j)
    F(v) = −b'v − Σ_j log(1 + exp(a_j + Σ_i v_i W_ij)),      P(v) = exp(−F(v))/Z,      log_score = −F
    Z = Σ_h e^{a'h} Π_i (1 + exp(b_i + W_i·h)): exact where H or D is at most 20

Units are tokens 0 and 1, so v is a string of D tokens. A sweep draws h given v and then v given h, reversibly in v.
For annealed importance sampling f(v, s) has s·(W, a, b), and (1 − s) of a start b_0 for the visible biases.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Rows
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace

_LARGEST = 20  # units of the layer that is summed over
_ROWS = 2**16


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) to the last bit, where torch's own is x above 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


@final
class RBM(nn.Module):
    """P(v) ∝ exp(−F(v)), a ``Model`` of strings of D tokens.

    >>> rbm = RBM(visible=3, hidden=2, rng=Rng(0))
    >>> strings = rbm.space.enumerate()
    >>> round(rbm.log_prob(strings.tokens).exp().sum().item(), 9)
    1.0
    """

    def __init__(self, *, visible: int, hidden: int, rng: Rng, scale: float = 0.01) -> None:
        super().__init__()
        if visible < 1 or hidden < 1:
            raise UserError(f"{visible} visible and {hidden} hidden units were asked for: ask for at least one of each")
        self.weights = nn.Parameter(scale * rng.normal(visible, hidden))
        self.visible_bias = nn.Parameter(torch.zeros(visible, dtype=torch.float64))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden, dtype=torch.float64))

    @property
    def space(self) -> SequenceSpace:
        """All visible vectors, as strings of D tokens."""
        return SequenceSpace(vocab_size=2, length=len(self.visible_bias))

    def free_energy(self, v: Float[Tensor, "*n D"], *, scale: float = 1.0) -> Float[Tensor, "*n"]:
        """F(v) with all parameters times ``scale``, with gradients."""
        v = v.to(self.weights.dtype)
        return -scale * (v @ self.visible_bias) - softplus(scale * (self.hidden_bias + v @ self.weights)).sum(-1)

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """−F(v), not normalised."""
        return -self.free_energy(x.tokens.double())

    def log_partition(self) -> Float[Tensor, ""]:
        """log Z, exact, with gradients, by a sum over the smaller layer."""
        is_wide = len(self.hidden_bias) > len(self.visible_bias)
        W = self.weights.T if is_wide else self.weights
        b, a = (self.hidden_bias, self.visible_bias) if is_wide else (self.visible_bias, self.hidden_bias)
        n = len(a)
        if n > _LARGEST:
            raise UserError(f"an exact sum over 2^{n} states is too long: estimate log Z (RBMPath, annealed_bounds)")
        parts = []
        for some in torch.arange(2**n).split(_ROWS):
            h = ((some.unsqueeze(1) >> torch.arange(n)) & 1).to(W.dtype)
            parts.append((h @ a + softplus(b + h @ W.T).sum(1)).logsumexp(0))
        return torch.stack(parts).logsumexp(0)

    def log_prob(self, v: Tensor) -> Float[Tensor, "*n"]:
        """log P(v), exact, with gradients."""
        return -self.free_energy(v.double()) - self.log_partition()

    def hidden_probs(self, v: Float[Tensor, "*n D"]) -> Float[Tensor, "*n H"]:
        """P(h_j = 1 | v)."""
        return torch.sigmoid(self.hidden_bias + v.to(self.weights.dtype) @ self.weights)

    def visible_probs(self, h: Float[Tensor, "*n H"]) -> Float[Tensor, "*n D"]:
        """P(v_i = 1 | h)."""
        return torch.sigmoid(self.visible_bias + h.to(self.weights.dtype) @ self.weights.T)

    @torch.no_grad()
    def sweep(
        self,
        x: Continuations,
        rng: Rng,
        *,
        scale: float = 1.0,
        start: Float[Tensor, " D"] | None = None,
        backward: bool = False,
    ) -> Continuations:
        """Draw h given v, then v given h, for all chains; ``backward`` changes nothing, the move is reversible.

        ``scale`` multiplies all parameters, and 1 − ``scale`` of ``start`` is added to the visible biases.
        """
        v, (_, K), D = x.tokens[0].double(), x.shape, len(self.visible_bias)
        rows = rng.rows(1, K, D + len(self.hidden_bias))
        h = _coins(scale * (self.hidden_bias + v @ self.weights), rows)
        extra = 0.0 if start is None else (1 - scale) * start
        v = _coins(scale * (self.visible_bias + h @ self.weights.T) + extra, rows)
        return Continuations(x.contexts, v.long().unsqueeze(0), x.lengths)


def _coins(logits: Float[Tensor, "chains units"], rows: Rows) -> Float[Tensor, "chains units"]:
    """Flip one coin per chain and unit, each chain from its own stream."""
    first = rows.numbers(0)
    if first is None:  # a test walks every branch
        sides = torch.stack([torch.zeros_like(logits), logits], dim=-1)
        units = [rows.categorical(sides[:, j].unsqueeze(0))[0] for j in range(logits.shape[1])]
        return torch.stack(units, dim=1).double()
    return (rows.uniforms(logits.shape[1])[0] < torch.sigmoid(logits)).double()


@final
@dataclass(frozen=True, slots=True)
class RBMPath:
    """From independent units with logits ``start`` to the machine, for annealed importance sampling."""

    model: RBM
    start_logits: Float[Tensor, " D"]

    @property
    def log_partition_start(self) -> float:
        """H log 2 + Σ_i log(1 + e^{b_0i})."""
        return len(self.model.hidden_bias) * math.log(2) + float(softplus(self.start_logits).sum())

    def start(self, num: int, rng: Rng) -> Continuations:
        """Draw independent units."""
        D = len(self.start_logits)
        v = _coins(self.start_logits.double().expand(num, D), rng.rows(1, num, D))
        return Continuations(Sequences.from_lists([[]]), v.long().unsqueeze(0), torch.full((1, num), D))

    @torch.no_grad()
    def log_increase(self, x: Continuations, low: float, high: float) -> Float[Tensor, " chains"]:
        """log f(v, high) − log f(v, low)."""
        v = x.tokens[0].double()
        F = self.model.free_energy(v, scale=low) - self.model.free_energy(v, scale=high)
        return F - (high - low) * (v @ self.start_logits.double())

    def step(self, x: Continuations, beta: float, rng: Rng, *, backward: bool) -> Continuations:
        """Draw h given v and v given h at this scale."""
        return self.model.sweep(x, rng, scale=beta, start=self.start_logits.double(), backward=backward)
