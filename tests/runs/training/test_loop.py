"""The training loop: the optimiser's mathematics, early stopping, and exact resume after any stop."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from freenergy import Rng, UserError
from freenergy.core.files import file_hash
from freenergy.core.roles import Loss
from freenergy.lm.networks.blocks import Blocks
from freenergy.training.loop import fit
from freenergy.training.settings import Optimisation
from freenergy.training.task import Validation


class Quadratic:
    """A task whose loss is known: ‖w − target‖² on noisy data, with dropout in the way."""

    def __init__(self, micro_size=4, accumulate=1, dropout=0.0, validations=None):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.data = Rng(0).normal(64, 3).float()
        self.micro_size, self.accumulate, self.validations = micro_size, accumulate, validations

    def loss(self, step, micro, rng):
        first = ((step - 1) * self.accumulate + micro) * self.micro_size % 64
        x = self.data[first : first + self.micro_size]
        return Loss(((self.module(x) - x.sum(1, keepdim=True)) ** 2).mean(), {"first": float(first)})

    def validate(self):
        if self.validations is not None:
            return Validation(self.validations.pop(0))
        return Validation(((self.module(self.data) - self.data.sum(1, keepdim=True)) ** 2).mean().item())


def weights(task):
    return torch.cat([weight.detach().flatten() for weight in task.module.parameters()])


def test_it_learns(tmp_path):
    task = Quadratic()
    records = list(
        fit(task, Optimisation(steps=300, learning_rate=0.02, warmup=10, validate_every=50), tmp_path, Rng(0))
    )
    assert records[-1].validation < 0.05 < 1 < records[0].loss
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, 301)
    )


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    settings = {"steps": 8, "batch_size": 8, "validate_every": 8}
    one, four = Quadratic(micro_size=8), Quadratic(micro_size=2, accumulate=4)
    list(fit(one, Optimisation(**settings), tmp_path / "one", Rng(0)))
    list(fit(four, Optimisation(**settings, accumulate=4), tmp_path / "four", Rng(0)))
    torch.testing.assert_close(weights(one), weights(four), atol=1e-6, rtol=0)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("stop", [1, 7, 10, 23])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, stop, ema):
    settings = Optimisation(steps=30, validate_every=10, checkpoint_seconds=0.0, ema=ema)
    whole = Quadratic(dropout=0.3)
    list(fit(whole, settings, tmp_path / "whole", Rng(4)))
    for _, record in zip(range(stop), fit(Quadratic(dropout=0.3), settings, tmp_path / "cut", Rng(4)), strict=False):
        last = record
    assert last.step == stop
    again = Quadratic(dropout=0.3)
    steps = [record.step for record in fit(again, settings, tmp_path / "cut", Rng(4))]
    assert steps[0] in (stop, stop + 1)  # the step whose record was seen may not have been saved yet
    assert torch.equal(weights(whole), weights(again))
    for name in ("checkpoint.safetensors", "best.safetensors"):
        assert file_hash(tmp_path / "whole" / name) == file_hash(tmp_path / "cut" / name)
    assert [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, 31)
    )


def test_dropout_depends_on_the_seed_alone(tmp_path):
    results = []
    for i, seed in enumerate([4, 4, 5]):
        torch.rand(i)  # what others did with the global generator does not matter
        task = Quadratic(dropout=0.5)
        list(fit(task, Optimisation(steps=5, validate_every=5), tmp_path / str(i), Rng(seed)))
        results.append(weights(task))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_early_stopping_keeps_the_best_weights(tmp_path):
    task = Quadratic(validations=[3.0, 1.0, 2.0, 2.5, 0.1])
    settings = Optimisation(steps=100, validate_every=2, patience=2)
    seen = {}
    for record in fit(task, settings, tmp_path, Rng(0)):
        seen[record.step] = weights(task)
    assert record.step == 8
    assert torch.equal(weights(task), seen[4])


def test_metrics_are_means_over_micro_batches(tmp_path):
    task = Quadratic(micro_size=2, accumulate=4)
    settings = Optimisation(steps=3, batch_size=8, accumulate=4, validate_every=3)
    assert [record.metrics for record in fit(task, settings, tmp_path, Rng(0))] == [
        {"first": 3.0}, {"first": 11.0}, {"first": 19.0}
    ]  # fmt: skip


def test_the_average_of_weights_is_what_is_validated_and_kept(tmp_path):
    """θ̄ by hand from the weights after every step; the steps themselves are those without an average."""
    settings = {"steps": 12, "validate_every": 12, "learning_rate": 0.05, "warmup": 0}
    plain, averaged = Quadratic(), Quadratic()
    mean = weights(plain)
    for record in fit(plain, Optimisation(**settings), tmp_path / "plain", Rng(0)):
        d = min(0.7, (1 + record.step) / (10 + record.step))
        mean = d * mean + (1 - d) * weights(plain)
        last = record
    *_, record = fit(averaged, Optimisation(**settings, ema=0.7), tmp_path / "averaged", Rng(0))
    torch.testing.assert_close(weights(averaged), mean, atol=1e-6, rtol=0)
    assert record.loss == last.loss
    assert record.validation == averaged.validate().value != last.validation


def test_divergence_is_one_sentence_and_keeps_the_checkpoint(tmp_path):
    task = Quadratic()
    healthy = task.loss
    task.loss = lambda step, micro, rng: (
        Loss(torch.tensor(math.nan, requires_grad=True), {}) if step == 5 else healthy(step, micro, rng)
    )
    with pytest.raises(UserError, match=r"diverged at step 5.*lower the learning rate"):
        list(fit(task, Optimisation(steps=9, validate_every=2), tmp_path, Rng(0)))
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path):
    list(fit(Quadratic(), Optimisation(steps=2, validate_every=1), tmp_path, Rng(0)))
    other = Quadratic()
    other.module = nn.Linear(3, 1)
    with pytest.raises(UserError, match="does not belong to this model or is damaged"):
        list(fit(other, Optimisation(steps=4, validate_every=1), tmp_path, Rng(0)))
    (tmp_path / "checkpoint.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="does not belong to this model or is damaged"):
        list(fit(Quadratic(), Optimisation(steps=4, validate_every=1), tmp_path, Rng(0)))


def test_schedules():
    cosine = Optimisation(steps=110, warmup=10, learning_rate=1.0, final_share=0.1)
    assert cosine.learning_rate_at(5) == pytest.approx(0.5)
    assert cosine.learning_rate_at(10) == pytest.approx(1)
    assert cosine.learning_rate_at(60) == pytest.approx(0.55)
    assert cosine.learning_rate_at(110) == pytest.approx(0.1)
    root = Optimisation(steps=110, warmup=10, learning_rate=1.0, schedule="inverse_sqrt")
    assert root.learning_rate_at(40) == pytest.approx(0.5)
    assert Optimisation(schedule="constant", warmup=0, learning_rate=0.3).learning_rate_at(1) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"batch_size": 8, "accumulate": 3}, "does not divide"),
        ({"patience": -1}, "patience is -1"),
    ],
)
def test_bad_settings_are_one_sentence(change, words):
    with pytest.raises(UserError, match=words):
        Optimisation(**change)


def test_blocks_cover_an_epoch_once_and_repeat_by_number():
    stream = np.arange(103, dtype=np.uint16)
    blocks = Blocks(stream, 10, Rng(2), name="training")
    rows = blocks.rows(0, len(blocks))
    starts = sorted(rows[:, 0].tolist())
    assert starts == list(range(starts[0], starts[0] + 10 * len(blocks), 10))
    assert (rows[:, 1:] == rows[:, :-1] + 1).all()
    later = Blocks(stream, 10, Rng(2), name="training").rows(13, 4)
    assert torch.equal(later, blocks.rows(13, 4))
    epochs = {tuple(blocks.rows(e * len(blocks), len(blocks))[:, 0].tolist()) for e in range(4)}
    assert len(epochs) == 4
    with pytest.raises(UserError, match="fewer than one block"):
        Blocks(stream[:5], 10, Rng(2), name="training")
