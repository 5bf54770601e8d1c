"""Training an energy by contrast, for the training loop.

    loss = objective(E(x⁺), E(x⁻)) + λ · mean E²,      E = offset + the energy that learns

The offset is the sum of energies that are trained already and stay as they are. An energy that is fitted at several
lengths sees one of them, drawn anew, in each micro-batch, and is validated on whole continuations. The held-out value
is minus the certified gain with n = K + 1 candidates (``partition.certificate``): early stopping watches what can be
promised.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.energies.checked import energies_in_parts, energies_of
from freenergy.errors import UserError
from freenergy.partition import certified_gain
from freenergy.progress import Progress
from freenergy.protocols import Loss, Objective, Scores
from freenergy.randomness import Rng
from freenergy.training.contrast import Batch, Contrast, StoredContrast, cut, cuts
from freenergy.training.feature_cache import own_energies
from freenergy.training.loop import Step, Validation
from freenergy.training.settings import EnergyTraining

_MOST_NATS = 700.0  # a token: e to more is no number
_ENOUGH_PAIRS = 5_000  # seen without leaving chance, before a word is said about it


@final
@dataclass(frozen=True, slots=True)
class Offset:
    """Energies that are trained already: of the stored windows as numbers, of fresh draws by reading."""

    energy: nn.Module
    train: Float[Tensor, "rows stored"] | None  # windows, cut after cut
    validation: Float[Tensor, "W held_out"]

    @torch.no_grad()
    def of(self, batch: Batch) -> Float[Tensor, "B N"]:
        """E of a training batch; its data stand in the training text and are not looked up there."""
        if self.train is not None and batch.columns is not None:
            return self.train[batch.index.unsqueeze(1), batch.columns]
        return own_energies(self.energy, batch.x)


@final
class EnergyTask:
    """One energy that learns, on top of others that do not."""

    def __init__(
        self,
        energy: nn.Module,
        train: Contrast,
        validation: StoredContrast,
        objective: Objective,
        settings: EnergyTraining,
        rng: Rng,
        offset: Offset | None = None,
    ) -> None:
        steps = settings.optimisation
        if len(train) < steps.batch_size:
            raise UserError(
                f"there are {len(train)} training windows but a batch has {steps.batch_size}: "
                "set training.optimisation.batch_size lower, or give more text or negatives.windows"
            )
        self.module = energy
        self.train, self.validation, self.objective, self.offset = train, validation, objective, offset
        self.settings, self.rng = settings, rng
        self.micro_size = steps.batch_size // steps.accumulate
        self.held_out = validation.all(torch.arange(len(validation)))
        self.cuts = cuts(self.held_out.tokens.shape[2], settings.lengths)

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """The objective on one micro-batch."""
        batch = self._cut(self.train.batch(self._index(step, micro), self.settings.negatives, rng), rng)
        E = energies_of(self.module, batch.x, where=f"the batch of step {step}").double()
        found = self.objective(*_scores(E if self.offset is None else E + self.offset.of(batch).to(E)))
        if not self.settings.energy_l2:
            return found
        return Loss(found.value + self.settings.energy_l2 * (E**2).mean(), found.metrics)

    def validate(self) -> Validation:
        """Certified gain, accuracies and energies on the held-out windows."""
        E = energies_in_parts(self.module, self.held_out, rows=self.settings.rows, where="validation")
        return validation_of(E if self.offset is None else E + self.offset.validation, self.objective)

    def _cut(self, batch: Batch, rng: Rng) -> Batch:
        """The batch at a random one of the lengths."""
        if len(self.cuts) == 1:
            return batch
        which = int(rng.child("cut").categorical(torch.zeros(len(self.cuts))))
        return Batch(cut(batch.x, self.cuts[which]), batch.index + which * len(self.train), batch.columns)

    def _index(self, step: int, micro: int) -> Tensor:
        """Windows in a new order every epoch; only whole batches."""
        size, accumulate = self.micro_size, self.settings.optimisation.accumulate
        per_epoch = len(self.train) // (size * accumulate)
        epoch, place = divmod(step - 1, per_epoch)
        order = self.rng.child("epoch", epoch).permutation(len(self.train))
        first = (place * accumulate + micro) * size
        return order[first : first + size]


def _scores(E: Float[Tensor, "B N"]) -> tuple[Scores, Scores]:
    return Scores(E[:, :1]), Scores(E[:, 1:])


def validation_of(E: Float[Tensor, "B N"], objective: Objective) -> Validation:
    """What held-out energies say; the datum is in the first column."""
    data, negatives = _scores(E)
    gains = certified_gain(E[:, :1], E[:, 1:])
    error = gains.std().item() / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    metrics = objective(data, negatives).metrics
    wins = (E[:, :1] < E[:, 1:]).double() + (E[:, :1] == E[:, 1:]).double() / 2
    more = {"pair_accuracy": wins.mean().item(), "gain_error": min(error, 1e9)}
    return Validation(-gains.mean().item(), metrics | more)


@final
class Watch:
    """The live line, and the two famous failures told in words."""

    def __init__(self, progress: Progress, tokens_per_sequence: float, pairs_per_step: int) -> None:
        self._progress, self._tokens, self._pairs = progress, tokens_per_sequence, pairs_per_step
        self._has_spoken = False
        self._held_out = ""
        self._rate = 0.0

    def line(self, record: Step) -> str:
        """Loss, accuracies, energies, certified gain, pairs a second."""
        now = self._pairs / max(record.seconds, 1e-9)
        self._rate = now if not self._rate else 0.9 * self._rate + 0.1 * now
        if record.validation is not None:
            gain = -record.validation
            self._held_out = f"certified gain {gain:.2f} nats ({self.percent(gain):+.1f} % perplexity)"
            self._speak(record)
        m = record.metrics
        return (
            f"loss {record.loss:.3f}, right on data {m['accuracy_data']:.2f} on noise {m['accuracy_noise']:.2f}, "
            f"E {m['energy_data']:+.2f}/{m['energy_noise']:+.2f} ± {m['spread']:.2f}, "
            f"{self._held_out + ', ' if self._held_out else ''}{self._rate:.0f} pairs/s"
        )

    def percent(self, gain: float) -> float:
        """A gain in nats a sequence as a change of perplexity."""
        return 100 * (math.exp(min(-gain / self._tokens, _MOST_NATS)) - 1)

    def _speak(self, record: Step) -> None:
        """Still at chance after a while: it need not be a bug, and there is something to do."""
        m, pairs = record.validation_metrics, record.step * self._pairs
        at_chance = -(record.validation or 0.0) < 2 * m["gain_error"] and m["pair_accuracy"] < 0.55
        if at_chance and pairs >= _ENOUGH_PAIRS and not self._has_spoken:
            self._has_spoken = True
            self._progress.say(
                f"still at chance after {pairs:,} pairs (held-out accuracy {m['pair_accuracy']:.2f}): a flat loss need "
                'not be a bug, pooled energies stay there long; try kind = "log-ratio", "probe" or "ngram", a higher '
                "learning rate, or more steps"
            )
