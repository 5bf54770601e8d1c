"""The one task that trains every network that maps a context to logits: text, translations, images.

    loss = CE + weight · (E-ARM) · (its data tokens / all)      from E-ARM's first epoch on, before it CE alone
    CE   = −mean over tokens of (1 − ε)·log q(x_t | g, x̃_<t) + ε·mean_v log q(v | g, x̃_<t), + level · mean S²

x̃ are the data's own tokens, or with scheduled sampling a mixture: a first pass on the data predicts every token, and
each is replaced by its prediction with a probability that grows over the epochs; the second pass, on the mixture, has
the loss (the two passes of Mihaylova and Martins 2019). ε is label smoothing. S = log Σ_v e^{logit of v} is free for a
softmax; level holds it near 0, so that E-ARM, whose energy it is, need not begin by correcting it. E-ARM compares the
data with rows that the network itself has drawn after the same beginning (``objectives.earm``). Fakes may cover a part
of each row only; both losses then count by tokens, so that weight 1 makes a step of Eq. 6 worth a token of
cross-entropy.
"""

import math
from contextlib import nullcontext
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from freenergy.core.errors import DivergenceError, UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.lm.networks.protocol import Batch, Data, Lanes, Network, Recurrent
from freenergy.objectives.earm import EARM, Denominators, Steps, Sums
from freenergy.training.settings import LanguageModelLoss
from freenergy.training.task import Validation

_SMOOTH = 0.95  # decay of the averages that detect divergence: about twenty steps


@final
class AutoregressiveTask:
    """Trains a network by cross-entropy, and by E-ARM where that is asked for."""

    def __init__(self, network: Network, data: Data, settings: LanguageModelLoss) -> None:
        self.network, self.data, self.settings = network, data, settings
        self.module = network.module
        self.memory = network if isinstance(network, Recurrent) else None
        self.fakes = _Fakes(network, settings.earm) if settings.earm else None

    @property
    def state(self) -> dict[str, Tensor]:
        """Returns what is carried from step to step next to the weights."""
        return (self.fakes.state if self.fakes else {}) | (self.memory.state if self.memory else {})

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Updates the state with the fakes of all micro-batches of a step."""
        if self.fakes and statistics:
            self.fakes.settle(step, statistics)

    def check(self, steps: int) -> None:
        """Refuses a training that ends before E-ARM starts."""
        epochs, earm = steps / self.data.epoch_steps, self.settings.earm
        if earm and earm.start_epoch >= epochs:
            raise UserError(
                f"E-ARM starts at epoch {earm.start_epoch:g}, but training ends after {epochs:.2f} epochs of "
                f"{self.data.epoch_steps} steps: set start_epoch lower, or more steps"
            )

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Returns the loss of one micro-batch."""
        if self.memory and isinstance(self.data, Lanes) and self.data.is_first(step):
            self.memory.forget()
        batch, epoch = self._on_device(self.data.batch(step, micro)), (step - 1) / self.data.epoch_steps
        share = self.settings.scheduled.share(epoch) if self.settings.scheduled else 0.0
        fakes = self.fakes if self.fakes and epoch >= self.fakes.settings.start_epoch else None
        with torch.no_grad() if share and not fakes else nullcontext():  # then the first pass only predicts
            logits = self.network.logits(batch.given, batch.tokens)
        read = self._again(batch, logits.detach(), share, rng.child("scheduled")) if share else logits
        nats = cross_entropy_of(read, batch, self.settings.label_smoothing)
        if self.settings.level:
            nats = nats + self.settings.level * (read.logsumexp(-1)[batch.mask] ** 2).mean()
        found = fakes.loss(batch, logits, nats, rng.child("fakes")) if fakes else Loss(nats, {})
        if self.memory:
            self.memory.remember()
        return found

    def validate(self) -> Validation:
        """Mean cross-entropy over the held-out rows, in nats per token, without smoothing."""
        total = count = 0.0
        with self.memory.apart() if self.memory else nullcontext():
            for rows in self.data.held_out():
                batch = self._on_device(rows)
                tokens = float(batch.mask.sum())
                nats = cross_entropy_of(self.network.logits(batch.given, batch.tokens), batch, 0.0)
                total, count = total + nats.item() * tokens, count + tokens
                if self.memory:
                    self.memory.remember()
        return Validation(total / count)

    def _again(self, batch: Batch, logits: Float[Tensor, "rows T V"], share: float, rng: Rng) -> Tensor:
        """The second pass, on a mixture of data and predictions."""
        assert self.settings.scheduled is not None, "there is a share"
        by = self.settings.scheduled.by
        predicted = logits.argmax(-1) if by == "argmax" else rng.child("tokens").categorical(logits)
        is_replaced = (rng.child("places").uniform(*predicted.shape) < share).to(predicted.device) & batch.mask
        mixed: Int[Tensor, "rows T"] = torch.where(is_replaced, predicted, batch.tokens)
        return self.network.logits(batch.given, mixed)

    def _on_device(self, batch: Batch) -> Batch:
        device = next(self.module.parameters()).device
        return Batch(batch.given, batch.tokens.to(device), batch.mask.to(device), batch.known)


@final
class _Fakes:
    """E-ARM's part of the loss, and what it carries from step to step."""

    def __init__(self, network: Network, settings: EARM) -> None:
        self.network, self.settings = network, settings
        self.denominators = Denominators(settings.length, settings.decay)
        # averages that detect divergence: of E_x S − log Z, of cross-entropy, of 1; and the first cross-entropy
        self.watched = torch.zeros(4, dtype=torch.float64)

    @property
    def state(self) -> dict[str, Tensor]:
        return {"log_z": self.denominators.log_z, "seen": self.denominators.seen, "watched": self.watched}

    def loss(self, batch: Batch, logits: Float[Tensor, "rows T V"], nats: Tensor, rng: Rng) -> Loss:
        """CE + weight · (E-ARM) · (share of the tokens); ``logits`` are those of the data."""
        data, fakes = steps_of(self.network, batch, logits, self.settings.length, rng)
        sums = Sums.of(fakes, self.settings.length)
        log_z = self.denominators.with_rows(sums)[: fakes.mask.shape[1]].to(fakes.log_sum)
        found = self.settings(data, fakes, log_z)
        weight = self.settings.weight * float(data.mask.sum() / batch.mask.sum())
        watched = torch.tensor([found.metrics["gain"], nats.item(), len(fakes.mask)], dtype=torch.float64)
        statistics = {"log_total": sums.log_total, "rows": sums.rows, "watched": watched}
        return Loss(nats + weight * found.value, {"cross_entropy": nats.item()} | found.metrics, statistics)

    def settle(self, step: int, statistics: dict[str, Tensor]) -> None:
        """Adds the rows of all micro-batches of a step to Z, and checks for divergence."""
        self.denominators.take(Sums(statistics["log_total"].logsumexp(0), statistics["rows"].sum(0)))
        gain, nats, _ = statistics["watched"].mean(0).tolist()
        self._watch(gain, nats, int(statistics["watched"][:, 2].sum()), step)

    def _watch(self, gain: float, nats: float, rows: int, step: int) -> None:
        """Raises an error that says what to change when the negative phase diverges.

        n fake rows can show that the data are log n nats likelier, with Z averaged over batches log(n / (1 − decay))
        (``partition.certificate``): beyond that the weights mean nothing and S grows without bound. Cross-entropy
        above log V is worse than a uniform guess, unless it started there.
        """
        if not self.watched[2]:
            self.watched[3] = nats
        self.watched[:3] *= _SMOOTH
        self.watched[:3] += (1 - _SMOOTH) * torch.tensor([gain, nats, 1.0], dtype=torch.float64)
        gain, nats, seen, first = self.watched.tolist()
        most = math.log(rows / (1 - self.settings.decay)) + 1
        worst = max(math.log(self.network.vocab_size), first) + 1
        if not math.isfinite(gain + nats) or (seen > 1 - _SMOOTH**10 and (gain / seen > most or nats / seen > worst)):
            raise DivergenceError(
                f"E-ARM's negative phase diverged at step {step} (S separates data from fakes by {gain / seen:.1f} "
                f"nats, but {rows} fake rows can show at most {most:.1f}; cross-entropy {nats / seen:.2f}): lower "
                "earm.weight or the learning rate, or start at a later epoch; earlier checkpoints are kept"
            )


def steps_of(
    network: Network, batch: Batch, logits: Float[Tensor, "rows T V"], length: int, rng: Rng
) -> tuple[Steps, Steps]:
    """Of the data, whose logits these are, and of rows drawn after the same beginnings; as many steps of both."""
    known = batch.tokens[:, : batch.known]
    drawn, mask = network.draw(batch.given, known, length, rng)
    K = min(drawn.shape[1], batch.tokens.shape[1] - batch.known)
    here = slice(batch.known, batch.known + K)
    made_up = network.logits(batch.given, torch.cat([known, drawn[:, :K]], dim=1))
    fakes = Steps.of(made_up[:, batch.known :], drawn[:, :K], mask[:, :K])
    return Steps.of(logits[:, here], batch.tokens[:, here], batch.mask[:, here]), fakes


def cross_entropy_of(logits: Float[Tensor, "rows T V"], batch: Batch, label_smoothing: float) -> Float[Tensor, ""]:
    """Mean over the tokens that count, in nats."""
    targets = batch.tokens.masked_fill(~batch.mask, -100)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing)
