"""Training a network of whole sentences against noise: alone, on top of a fitted field, or with its features at once.

    U(x) = λ · f(x) + s · h(x) + b + U_0(x)
    loss = mean_D log(1 + ν e^{−U}) + ν · mean_B log(1 + e^{U} / ν) + l2 · ‖λ‖² / 2        (U = log p / q)

    head      h alone                       stages   λ is fitted first (``sparse_fit``), U_0 = λ · f stays, h learns
    joint     λ and h learn in one step, from zero

B are draws of the base, made once, so that every part sees the same noise and a step costs no draws. The loss is
the one of ``sparse_fit``, batch by batch. What is validated is the certified gain on held-out sentences, with draws
that train nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn.functional import softplus

from freenergy.core.checks import check_range
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.core.sentences import Sentences
from freenergy.energies.heads import NeuralHead
from freenergy.energies.mixed import head_potential, padded
from freenergy.partition.lengths import LengthSums
from freenergy.training.settings import Optimisation
from freenergy.training.task import Shuffled, Validation

Parts = Literal["head", "stages", "joint"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTraining:
    """How a head learns, and what becomes of the discrete features beside it."""

    parts: Parts = "stages"
    l2: float = 1e-3  # of λ in joint training
    weights_rate: float = 3.0  # λ learns so many times faster than the network, in joint training
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(
            steps=1500, batch_size=64, learning_rate=2e-3, warmup=50, weight_decay=0.0, validate_every=300
        )
    )

    def __post_init__(self) -> None:
        check_range(self, "l2", at_least=0)
        check_range(self, "weights_rate", above=0)


class Side(NamedTuple):
    """Sentences of one side of the contrast, with features and a potential that stays."""

    text: Sentences
    features: csr_matrix | None
    fixed: Float64[np.ndarray, " R"]  # U_0


class _Parts(nn.Module):
    def __init__(self, head: NeuralHead, num: int) -> None:
        super().__init__()
        self.head = head
        self.weights = nn.Parameter(torch.zeros(num))
        self.bias = nn.Parameter(torch.zeros(()))


@final
class SentenceFieldTask:
    """A head over whole sentences, with or without weights of patterns; plays ``Task`` and ``Grouped``.

    ``draws`` counts all draws of the noise, also those that are not among its sentences.
    """

    def __init__(
        self,
        head: NeuralHead,
        data: Side,
        noise: Side,
        held_out: Side,
        fresh: Side,
        *,
        draws: tuple[int, int],
        longest: int,
        settings: NetworkTraining,
        rng: Rng,
    ) -> None:
        self.data, self.noise, self.held_out, self.fresh, self.settings = data, noise, held_out, fresh, settings
        self.draws, self.longest, steps = draws, longest, settings.optimisation
        self.ratio = max(1, round(noise.text.num / data.text.num))
        self._module = _Parts(head, data.features.shape[1] if data.features is not None else 0)
        self._rows = Shuffled(data.text.num, steps, rng.child("data"))
        more = Optimisation(batch_size=steps.batch_size * self.ratio, accumulate=steps.accumulate)
        self._others = Shuffled(noise.text.num, more, rng.child("noise"))

    @property
    def module(self) -> nn.Module:
        """The head, λ and b."""
        return self._module

    @property
    def head(self) -> NeuralHead:
        """The network."""
        return self._module.head

    @property
    def weights(self) -> Float64[np.ndarray, " F"]:
        """λ as it is now."""
        return self._module.weights.detach().double().numpy()

    @property
    def bias(self) -> float:
        """b as it is now."""
        return float(self._module.bias.detach())

    def parameter_groups(self, settings: Optimisation) -> list[dict[str, Any]]:
        """Returns the network and the weights of patterns, each at its own rate."""
        head = [weight for weight in self._module.head.parameters() if weight.requires_grad]
        decay = {"weight_decay": settings.weight_decay, "rate": 1.0}
        rest = {"weight_decay": 0.0, "rate": self.settings.weights_rate}
        return [{"params": head, **decay}, {"params": [self._module.weights, self._module.bias], **rest}]

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Returns the contrast of some sentences with ν times as many draws."""
        positive = self._potential(self.data, self._rows(step, micro).numpy())
        negative = self._potential(self.noise, self._others(step, micro).numpy())
        nu, log_nu = float(self.ratio), float(np.log(self.ratio))
        share = self.noise.text.num / self.draws[0]  # draws that were cut have U = −inf, and add nothing
        value = softplus(log_nu - positive).mean() + nu * share * softplus(negative - log_nu).mean()
        metrics = {"data": float(positive.detach().mean()), "noise": float(negative.detach().mean())}
        return Loss(value + self.settings.l2 / 2 * self._module.weights.square().sum(), metrics)

    def validate(self) -> Validation:
        """Returns the certified nats per held-out sentence, as a loss, and how many fresh draws count."""
        drawn, human = self._whole(self.fresh), self._whole(self.held_out)
        sums = LengthSums.of(drawn, self.fresh.text.lengths, self.draws[1], self.longest)
        gain = float(sums.certified(human, self.held_out.text.lengths).mean())
        return Validation(-gain, {"gain": gain, "ess": sums.single().ess})

    def _potential(self, side: Side, rows: np.ndarray) -> Float[Tensor, " R"]:
        """Return U of some sentences, with gradients."""
        rows = np.sort(rows)
        head, tokens = self._module.head, padded(side.text, rows)
        found: Tensor = head.scale * head.potential(*tokens) + self._module.bias + torch.from_numpy(side.fixed[rows])
        if side.features is None:
            return found
        some = side.features[rows]
        each = self._module.weights[torch.from_numpy(some.indices.astype(np.int64))] * torch.from_numpy(some.data)
        row = torch.from_numpy(np.repeat(np.arange(len(rows)), np.diff(some.indptr)))
        return found + torch.zeros(len(rows)).index_add(0, row, each)

    def _whole(self, side: Side) -> Float64[np.ndarray, " R"]:
        """Return U of all sentences of a side."""
        found: Float64[np.ndarray, " R"] = head_potential(self._module.head, side.text) + self.bias + side.fixed
        if side.features is not None:
            found += side.features @ self.weights
        return found


def side_of(text: Sentences, features: csr_matrix | None = None, fixed: np.ndarray | None = None) -> Side:
    """Returns a side; nothing is fixed unless given."""
    return Side(text, features, np.zeros(text.num) if fixed is None else fixed)
