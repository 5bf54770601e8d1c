"""The task of training an energy by contrast with negatives.

    loss = objective(scores of x⁺, of x⁻) + λ · mean E²,      log_score = log P_LM − E,   E = offset + what learns

The offset is the sum of energies that are trained already and stay as they are. Where the noise is not the base but its
law is known, the scores hold it (``NoiseLaw``); a noise that learns adds its own loss, and its weights learn at a rate
of their own. An energy that is fitted at several
lengths sees a random one of them in each micro-batch, and is validated on whole continuations. The held-out value
is minus the certified gain with n = K + 1 candidates (``partition.certificate``): early stopping watches what can be
certified.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss, Objective
from freenergy.core.sequences import Continuations
from freenergy.energies.call import energies_in_batches, energies_of
from freenergy.energies.module import LogBaseEnergy
from freenergy.partition import certified_gain
from freenergy.training.contrastive_batches import (
    Contrast,
    ContrastiveBatch,
    NoiseLaw,
    StoredContrast,
    cut,
    cuts,
    scores_of,
)
from freenergy.training.feature_cache import own_energies
from freenergy.training.loop import StepRecord
from freenergy.training.settings import EnergyTraining, Optimisation
from freenergy.training.task import Shuffled, Validation, parameter_groups

_MAX_NATS = 700.0  # per token: the exponential of more overflows
_ENOUGH_PAIRS = 5_000  # seen at chance accuracy before a hint is printed


class Offset(NamedTuple):
    """Energies that are trained already: looked up for stored windows, computed for fresh draws."""

    energy: nn.Module
    train: Float[Tensor, "rows stored"] | None  # windows, cut after cut
    validation: Float[Tensor, "W held_out"]

    @torch.no_grad()
    def of(self, batch: ContrastiveBatch) -> Float[Tensor, "B N"]:
        """E of a training batch; its data stand in the training text and are not looked up there."""
        if self.train is not None and batch.columns is not None:
            return self.train[batch.index.unsqueeze(1), batch.columns]
        return own_energies(self.energy, batch.x)


@final
class BaseNumbers:
    """log P_LM of what a ``LogBaseEnergy`` learns from, so that the frozen base reads no string twice.

    The negatives came with theirs. That of a datum is read when it is first met, from its window alone, so that it has
    the same bits whenever that is, and a training that was interrupted ends as one that was not.
    """

    def __init__(self, energy: LogBaseEnergy, windows: int) -> None:
        self._energy, self._data = energy, torch.full((windows,), torch.nan, dtype=torch.float64)
        self._held_out: dict[str, Tensor] = {}

    def of(self, batch: ContrastiveBatch) -> dict[str, Float[Tensor, "batch candidates"]]:
        """Data first, as in the batch; nothing where the negatives are cut, as they were not drawn so."""
        if batch.log_base is None:
            return {}
        index = batch.index % len(self._data)
        for i, row in enumerate(index.tolist()):
            if self._data[row].isnan():
                datum = batch.x[i : i + 1].candidates(slice(0, 1))
                self._data[row] = self._energy.log_base(datum).item()
        return {"log_base": torch.cat([self._data[index].unsqueeze(1), batch.log_base], dim=1)}

    def of_held_out(self, x: Continuations, rows: int) -> dict[str, Float[Tensor, "windows candidates"]]:
        """The same of what is validated on, read at the first validation."""
        if not self._held_out:
            self._held_out = {"log_base": energies_in_batches(self._energy.log_base, x, batch_size=rows)}
        return self._held_out


@final
class ContrastiveTask:
    """Trains one energy on top of others that are fixed."""

    def __init__(
        self,
        energy: nn.Module,
        train: Contrast,
        validation: StoredContrast,
        objective: Objective,
        settings: EnergyTraining,
        rng: Rng,
        offset: Offset | None = None,
        law: NoiseLaw | None = None,
    ) -> None:
        steps = settings.optimisation
        if len(train) < steps.batch_size:
            raise UserError(
                f"there are {len(train)} training windows but a batch has {steps.batch_size}: "
                "set training.optimisation.batch_size lower, or give more text or negatives.windows"
            )
        self.energy, self.law = energy, law
        learns = None if law is None else law.module
        self.module = energy if learns is None else nn.ModuleDict({"energy": energy, "noise": learns})
        self.state = train.init(rng.child("noise"))
        if self.state and steps.accumulate > 1:
            raise UserError(
                "a noise with a state continues from batch to batch, so a step is one batch: set accumulate to 1"
            )
        self.train, self.validation, self.objective, self.offset = train, validation, objective, offset
        self.settings = settings
        self.held_out = validation.all(torch.arange(len(validation)))
        self.cuts = cuts(self.held_out.tokens.shape[2], settings.lengths)
        self.base = BaseNumbers(energy, len(train)) if isinstance(energy, LogBaseEnergy) else None
        self._index = Shuffled(len(train), steps, rng)

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Returns the objective on one micro-batch."""
        whole = self.train.batch(self._index(step, micro), self.settings.negatives, rng, self.state)
        batch = self._cut(whole, rng)
        known = {} if self.base is None else self.base.of(batch)
        E = energies_of(self.energy, batch.x, where=f"the batch of step {step}", known=known).double()
        total = E if self.offset is None else E + self.offset.of(batch).to(E)
        found = self.objective(*scores_of(total, None if self.law is None else self.law.of(batch)))
        value, metrics = found.value, found.metrics
        if self.settings.energy_l2:
            value = value + self.settings.energy_l2 * (E**2).mean()
        if self.law is not None and self.law.module is not None:
            own = self.law.own_loss(batch.x.candidates(slice(0, 1)))
            value, metrics = value + own.to(value), metrics | {"noise_cross_entropy": own.item()}
        return Loss(value, metrics, dict(whole.state))

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Take over the state of the noise after the batch of this step."""
        for name, values in statistics.items():
            self.state[name].copy_(values[-1])

    def parameter_groups(self, settings: Optimisation) -> list[dict[str, Any]]:
        """The energy's weights, and those of a noise that learns, at its own rate."""
        groups = parameter_groups(self.energy, settings)
        if self.law is None or self.law.module is None:
            return groups
        return groups + parameter_groups(self.law.module, settings, rate=self.law.rate)

    def validate(self) -> Validation:
        """Measures certified gain, accuracies and energies on the held-out windows."""
        rows = self.settings.rows
        known = {} if self.base is None else self.base.of_held_out(self.held_out, rows)
        E = energies_in_batches(self.energy, self.held_out, batch_size=rows, where="validation", known=known)
        return validation_of(E if self.offset is None else E + self.offset.validation, self.objective)

    def _cut(self, batch: ContrastiveBatch, rng: Rng) -> ContrastiveBatch:
        """The batch at a random one of the lengths."""
        if len(self.cuts) == 1:
            return batch
        which = int(rng.child("cut").categorical(torch.zeros(len(self.cuts))))
        index, is_whole = batch.index + which * len(self.train), which == len(self.cuts) - 1
        x = cut(batch.x, self.cuts[which])
        if not is_whole:
            return ContrastiveBatch(x, index, batch.columns)
        return replace(batch, x=x, index=index)


def validation_of(E: Float[Tensor, "B N"], objective: Objective) -> Validation:
    """Measures held-out energies; the datum is in the first column."""
    data, negatives = scores_of(E)
    gains = certified_gain(E[:, :1], E[:, 1:])
    error = gains.std().item() / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    metrics = objective(data, negatives).metrics
    wins = (E[:, :1] < E[:, 1:]).double() + (E[:, :1] == E[:, 1:]).double() / 2
    more = {"pair_accuracy": wins.mean().item(), "gain_error": min(error, 1e9)}
    return Validation(-gains.mean().item(), metrics | more)


@final
class Watch:
    """The progress line, and a hint for training that stays at chance."""

    def __init__(self, progress: Progress, tokens_per_sequence: float, pairs_per_step: int) -> None:
        self._progress, self._tokens, self._pairs = progress, tokens_per_sequence, pairs_per_step
        self._has_hinted, self._held_out, self._rate = False, "", 0.0

    def line(self, record: StepRecord) -> str:
        """Returns loss, accuracies, energies, certified gain, pairs per second."""
        now = self._pairs / max(record.seconds, 1e-9)
        self._rate = now if not self._rate else 0.9 * self._rate + 0.1 * now
        if record.validation is not None:
            gain = -record.validation
            percent = 100 * (math.exp(min(-gain / self._tokens, _MAX_NATS)) - 1)
            self._held_out = f"certified gain {gain:.2f} nats ({percent:+.1f} % perplexity)"
            self._hint(record)
        m = record.metrics
        return (
            f"loss {record.loss:.3f}, right on data {m['accuracy_data']:.2f} on noise {m['accuracy_noise']:.2f}, "
            f"E {m['energy_data']:+.2f}/{m['energy_noise']:+.2f} ± {m['spread']:.2f}, "
            f"{self._held_out + ', ' if self._held_out else ''}{self._rate:.0f} pairs/s"
        )

    def _hint(self, record: StepRecord) -> None:
        """Prints one hint when held-out accuracy is still at chance."""
        m, pairs = record.validation_metrics, record.step * self._pairs
        at_chance = -(record.validation or 0.0) < 2 * m["gain_error"] and m["pair_accuracy"] < 0.55
        if at_chance and pairs >= _ENOUGH_PAIRS and not self._has_hinted:
            self._has_hinted = True
            self._progress.say(
                f"still at chance after {pairs:,} pairs (held-out accuracy {m['pair_accuracy']:.2f}): a flat loss need "
                'not be a bug, pooled energies stay there long; try kind = "log-ratio", "probe" or "ngram", a higher '
                "learning rate, or more steps"
            )
