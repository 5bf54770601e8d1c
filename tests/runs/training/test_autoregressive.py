"""The one task for every network: cross-entropy, label smoothing, scheduled sampling, E-ARM, and what is carried on."""

import copy
import math

import pytest
import torch
from torch import nn

from freenergy import Rng, UserError
from freenergy.core.files import file_hash
from freenergy.lm.networks.protocol import Batch, Data, Network
from freenergy.objectives.earm import EARM, Denominators, Steps
from freenergy.training.loop import fit
from freenergy.training.settings import LanguageModelLoss, Optimisation, ScheduledSampling
from freenergy.training.task import Stateful, Task
from freenergy.training.tasks.autoregressive import AutoregressiveTask

V, END = 4, 0


class Bigram:
    """The next token by the last one; a row ends with token 0 where ``ends``."""

    def __init__(self, seed=0, ends=False, dropout=0.0):
        self.module = nn.Sequential(nn.Embedding(V + 1, 8), nn.Dropout(dropout), nn.Linear(8, V))
        with torch.no_grad():
            for i, weight in enumerate(self.module.parameters()):
                weight.copy_(Rng(seed).child(i).normal(*weight.shape))
        self.ends, self.vocab_size = ends, V

    def logits(self, given, tokens):
        before = torch.cat([torch.full_like(tokens[:, :1], V), tokens[:, :-1]], dim=1)
        return self.module(before)

    @torch.no_grad()
    def draw(self, given, known, length, rng):
        rows, mask = known, torch.ones(len(known), 0, dtype=torch.bool)
        alive = torch.ones(len(known), 1, dtype=torch.bool)
        for k in range(length):
            filled = torch.nn.functional.pad(rows, (0, 1))
            token = rng.child(k).categorical(self.logits(given, filled)[:, -1])
            rows, mask = torch.cat([rows, token.unsqueeze(1)], 1), torch.cat([mask, alive], 1)
            alive = alive & (token.unsqueeze(1) != END) if self.ends else alive
        return rows[:, known.shape[1] :], mask


class Rows:
    """Rows of up to T tokens out of a fixed table."""

    def __init__(self, T=6, known=2, ends=False, size=8, steps=10):
        self.T, self.known, self.ends, self.size, self.epoch_steps = T, known, ends, size, steps

    def _batch(self, rng):
        tokens = (rng.uniform(self.size, self.T) * V).long()
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if self.ends:
            mask[:, 1:] = (tokens[:, :-1] != END).cumprod(1).bool()
        return Batch(None, tokens, mask, self.known)

    def batch(self, step, micro):
        return self._batch(Rng(1).child(step, micro))

    def held_out(self):
        yield self._batch(Rng(2))
        yield self._batch(Rng(3))


def test_roles():
    network, data = Bigram(), Rows()
    assert isinstance(network, Network)
    assert isinstance(data, Data)
    task = AutoregressiveTask(network, data, LanguageModelLoss())
    assert isinstance(task, Task)
    assert isinstance(task, Stateful)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_over_the_tokens_that_count(smoothing):
    network, data = Bigram(), Rows(ends=True)
    batch = data.batch(1, 0)
    log_q = network.logits(None, batch.tokens).log_softmax(-1)
    picked = log_q.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    exact = -((1 - smoothing) * picked + smoothing * log_q.mean(-1))[batch.mask].mean()
    found = AutoregressiveTask(network, data, LanguageModelLoss(label_smoothing=smoothing)).loss(1, 0, Rng(0)).value
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("scheduled", [None, ScheduledSampling(most=1.0, epochs=0.0, by="argmax")])
def test_the_level_of_the_logits_is_held_where_the_loss_is_read(scheduled):
    network, data = Bigram(), Rows(ends=True)
    batch = data.batch(1, 0)
    logits = network.logits(None, batch.tokens)
    if scheduled:
        logits = network.logits(None, torch.where(batch.mask, logits.argmax(-1), batch.tokens))
    exact = 0.3 * (logits.logsumexp(-1)[batch.mask] ** 2).mean()
    held, free = (
        AutoregressiveTask(network, data, LanguageModelLoss(level=level, scheduled=scheduled)).loss(1, 0, Rng(0)).value
        for level in (0.3, 0.0)
    )
    torch.testing.assert_close(held - free, exact)


def test_a_level_that_is_held_makes_s_flat_and_leaves_the_softmax_alone(tmp_path):
    spread = {}
    for level in (0.0, 0.1):
        network = Bigram()
        task = AutoregressiveTask(network, Rows(steps=100), LanguageModelLoss(level=level))
        settings = Optimisation(steps=150, batch_size=8, learning_rate=0.05, warmup=0, validate_every=50)
        for _ in fit(task, settings, tmp_path / str(level), Rng(0)):
            pass
        S = network.logits(None, torch.arange(V).unsqueeze(0)).logsumexp(-1)
        spread[level] = S.abs().max().item(), task.validate().value
    assert spread[0.1][0] < 0.2 < spread[0.0][0]
    assert spread[0.1][1] == pytest.approx(spread[0.0][1], abs=0.02)


@pytest.mark.parametrize("level", [-1.0, math.inf, math.nan])
def test_a_level_that_cannot_be_is_refused(level):
    with pytest.raises(UserError, match="level is"):
        LanguageModelLoss(level=level)


def test_validation_is_nats_a_token_without_smoothing():
    network, data = Bigram(), Rows(ends=True)
    total = count = 0.0
    for batch in data.held_out():
        log_q = network.logits(None, batch.tokens).log_softmax(-1)
        total -= log_q.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)[batch.mask].sum().item()
        count += batch.mask.sum().item()
    task = AutoregressiveTask(network, data, LanguageModelLoss(label_smoothing=0.3))
    assert task.validate().value == pytest.approx(total / count, rel=1e-5)


def test_scheduled_sampling_grows_and_replaces_that_share():
    scheduled = ScheduledSampling(most=0.5, start_epoch=1.0, epochs=2.0)
    assert [scheduled.share(epoch) for epoch in (0.0, 1.0, 2.0, 3.0, 9.0)] == [0.0, 0.0, 0.25, 0.5, 0.5]
    network = Bigram()
    reads = []
    plain = network.logits
    network.logits = lambda given, tokens: reads.append(tokens) or plain(given, tokens)
    data = Rows(size=2000, steps=1)
    task = AutoregressiveTask(
        network, data, LanguageModelLoss(scheduled=ScheduledSampling(most=0.5, epochs=0.0, by="argmax"))
    )
    found = task.loss(1, 0, Rng(0)).value
    truth, mixed = reads
    predicted = plain(None, truth).argmax(-1)
    changed = mixed != truth
    assert torch.equal(mixed[changed], predicted[changed])
    # 12,000 coins: five standard deviations of the share are 0.023; once in two million runs
    assert changed[predicted != truth].float().mean().item() == pytest.approx(0.5, abs=0.03)
    exact = nn.functional.cross_entropy(plain(None, mixed).flatten(0, 1), truth.flatten())
    torch.testing.assert_close(found, exact)  # the second pass has the loss, against the true tokens


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("with_scheduled", [False, True])
def test_earm_is_added_with_its_weight(ends, with_scheduled):
    """The task against the objective called by hand on the same rows."""
    network, data = Bigram(ends=ends), Rows(ends=ends)
    earm = EARM(weight=0.7, length=3, recent=1, start_epoch=0.0)
    scheduled = ScheduledSampling(most=0.5, epochs=0.0) if with_scheduled else None
    found = AutoregressiveTask(network, data, LanguageModelLoss(earm=earm, scheduled=scheduled)).loss(1, 0, Rng(5))
    nats = AutoregressiveTask(network, data, LanguageModelLoss(scheduled=scheduled)).loss(1, 0, Rng(5)).value
    batch = data.batch(1, 0)
    known = batch.tokens[:, :2]
    drawn, mask = network.draw(None, known, 3, Rng(5).child("fakes"))
    fakes = Steps.of(network.logits(None, torch.cat([known, drawn], 1))[:, 2:], drawn, mask)
    truth = Steps.of(network.logits(None, batch.tokens)[:, 2:5], batch.tokens[:, 2:5], batch.mask[:, 2:5])
    share = truth.mask.sum() / batch.mask.sum()
    exact = nats + 0.7 * share * earm(truth, fakes, Denominators(3, earm.decay).update(fakes)).value
    torch.testing.assert_close(found.value, exact)
    ours, theirs = (torch.autograd.grad(v, list(network.module.parameters())) for v in (found.value, exact))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert set(found.metrics) == {"cross_entropy", "gain", "effective", "largest_weight"}


def test_it_begins_at_its_epoch_and_not_before():
    earm = EARM(length=3, start_epoch=0.5)
    task = AutoregressiveTask(Bigram(), Rows(steps=10), LanguageModelLoss(earm=earm))
    assert "gain" not in task.loss(5, 0, Rng(0)).metrics
    assert "gain" in task.loss(6, 0, Rng(0)).metrics
    task.check(6)
    with pytest.raises(UserError, match="start_epoch"):
        task.check(5)


def test_rows_shorter_than_k_work():
    """K = 50 and rows of at most 4 tokens after the known ones, most of which end sooner."""
    task = AutoregressiveTask(Bigram(ends=True), Rows(ends=True), LanguageModelLoss(earm=EARM(start_epoch=0.0)))
    found = task.loss(1, 0, Rng(0))
    found.value.backward()
    assert math.isfinite(found.value.item())
    assert all(weight.grad.isfinite().all() for weight in task.module.parameters())
    task.settle(1, {name: tensor.unsqueeze(0) for name, tensor in found.statistics.items()})
    assert task.state["seen"].tolist()[:5] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("stop", [3, 10, 17])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, stop):
    """The averages of Z are part of a checkpoint."""
    settings = Optimisation(steps=25, validate_every=8, checkpoint_seconds=0.0)
    teaching = LanguageModelLoss(
        label_smoothing=0.1, scheduled=ScheduledSampling(most=0.5, epochs=1.0), earm=EARM(length=3, start_epoch=0.5)
    )
    made = [AutoregressiveTask(Bigram(dropout=0.2), Rows(), teaching) for _ in range(3)]
    list(fit(made[0], settings, tmp_path / "whole", Rng(4)))
    for _ in zip(range(stop), fit(made[1], settings, tmp_path / "cut", Rng(4)), strict=False):
        pass
    list(fit(made[2], settings, tmp_path / "cut", Rng(4)))
    for name in ("checkpoint.safetensors", "best.safetensors"):
        assert file_hash(tmp_path / "whole" / name) == file_hash(tmp_path / "cut" / name)
    assert made[0].state["seen"].max() > 10


def test_divergence_is_stopped_with_a_word(tmp_path):
    """A network that can tell data from its own draws by their first token, and an absurd weight."""
    network = Bigram()
    data = Rows(known=0)
    data._batch = lambda rng: Batch(None, torch.full((8, 6), 2), torch.ones(8, 6, dtype=torch.bool), 0)
    network.draw = lambda given, known, length, rng: (torch.full((8, 6), 1), torch.ones(8, 6, dtype=torch.bool))
    teaching = LanguageModelLoss(earm=EARM(length=6, recent=0, start_epoch=0.0, weight=20.0))
    task, settings = AutoregressiveTask(network, data, teaching), Optimisation(steps=400, learning_rate=0.1)
    with pytest.raises(UserError, match="negative phase diverged at step"):
        list(fit(task, settings, tmp_path, Rng(0)))


def test_a_healthy_run_is_not_stopped_and_learns(tmp_path):
    """On the same footing: fakes are the network's own draws, and perplexity falls to that of the data."""
    truth = Bigram(seed=9)

    class Drawn(Rows):
        def _batch(self, rng):
            tokens, mask = truth.draw(None, torch.zeros(64, 0, dtype=torch.long), self.T, rng)
            return Batch(None, tokens, mask, 0)

    network = Bigram(seed=1)
    task = AutoregressiveTask(
        network, Drawn(known=0), LanguageModelLoss(earm=EARM(length=6, start_epoch=0.5, reduced=True))
    )
    before = task.validate().value
    records = list(fit(task, Optimisation(steps=150, learning_rate=0.03, validate_every=50), tmp_path, Rng(0)))
    best = AutoregressiveTask(truth, Drawn(known=0), LanguageModelLoss()).validate().value
    assert records[-1].validation < best + 0.1 < before - 0.1
    assert records[-1].cpu_seconds > 0


def test_micro_batches_are_those_of_the_data():
    task = AutoregressiveTask(Bigram(), Rows(), LanguageModelLoss())
    first, second = (task.loss(1, micro, Rng(0)).value for micro in (0, 1))
    assert first != second
    assert torch.equal(first, copy.copy(task).loss(1, 0, Rng(0)).value)
