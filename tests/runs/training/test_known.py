"""What a training step does not do again: the frozen base's numbers, and a prefix that strings share."""

import math

import numpy as np
import pytest
import torch
import transformers

from freenergy import Continuations, HuggingFaceLM, RankingNCE, Rng, Sequences, SequenceSpace
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.log_ratio import LogRatio, LogRatioEnergy
from freenergy.energies.unit import Unit, UnitEnergy
from freenergy.lm.presets import build
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.training.contrastive_batches import FreshContrast, StoredContrast
from freenergy.training.loop import fit
from freenergy.training.settings import EnergyTraining, Optimisation
from freenergy.training.tasks.contrastive import ContrastiveTask

V, P, L, K = 9, 2, 4, 5
SPACE = SequenceSpace(vocab_size=V, length=L)


def base(dtype=torch.float64):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = build(config, Rng(0)).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return HuggingFaceLM(model, eos=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    lm, count = base(), 24
    stream = (Rng(3).uniform(count * (P + L)) * V).long().numpy()
    places = places_of(np.arange(count) * (P + L), L, np.arange(count))
    windows, stored = Windows(stream, places, P, L), []
    for split, rows in (("train", torch.arange(16)), ("validation", torch.arange(16, 24))):
        marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
        identity = Identity(**marks, split=split, per_prefix=K, space=SPACE)
        folder = tmp_path_factory.mktemp(split)
        NegativeShards(folder, rows, windows, FromLM(lm, SPACE), identity, Rng(5)).write(Silent())
        stored.append(StoredContrast(windows, NegativeStore.open(folder, identity)))
    return lm, windows, *stored


def task_of(lm, train, validation, **changes):
    energy = LogRatio(LogRatioEnergy(alpha=0.7), lm)
    with torch.no_grad():
        energy.readout.weight.copy_(0.3 * Rng(1).normal(1, 16))
        for i, weight in enumerate(energy.trunk.parameters()):
            weight.add_(0.1 * Rng(2).child(i).normal(*weight.shape))
    steps = Optimisation(steps=6, batch_size=4, learning_rate=1e-3, warmup=1, validate_every=3)
    settings = EnergyTraining(optimisation=steps, negatives=3, **changes)
    return ContrastiveTask(energy, train, validation, RankingNCE(), settings, Rng(7)), steps


def gradients(task, step):
    task.module.zero_grad()
    loss = task.loss(step, 0, Rng(0).child(step)).value
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in task.module.parameters()]


@pytest.mark.parametrize("fresh", [False, True])
def test_known_numbers_of_the_base_give_the_loss_and_gradients_of_reading_it(world, fresh):
    lm, windows, train, validation = world
    if fresh:
        train = FreshContrast(windows, torch.arange(16), FromLM(lm, SPACE))
    told, reading = (task_of(lm, train, validation)[0] for _ in range(2))
    reading.base = None
    for step in (1, 2, 5):  # the fifth begins the second epoch
        (a, first), (b, second) = gradients(told, step), gradients(reading, step)
        assert abs(a - b) < 1e-6
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(first, second, strict=True))
    assert abs(told.validate().value - reading.validate().value) < 1e-9


def test_the_base_reads_each_datum_once_and_no_negative(world, monkeypatch):
    lm, _, train, validation = world
    task, _ = task_of(lm, train, validation)
    trunk, read = task.module._base[0], []
    own = trunk.after
    monkeypatch.setattr(trunk, "after", lambda contexts: read.append(len(contexts)) or own(contexts))
    for step in range(1, 13):  # three epochs
        task.loss(step, 0, Rng(0).child(step))
    assert read == [1] * 16
    task.validate()
    seen = len(read)
    task.validate()
    assert len(read) == seen > 16


def test_cut_strings_are_read(world):
    lm, _, train, validation = world
    told, reading = (task_of(lm, train, validation, lengths=2)[0] for _ in range(2))
    reading.base = None
    widths = set()
    for step in range(1, 9):
        batch = told._cut(train.batch(told._index(step, 0), 3, Rng(0)), Rng(0).child(step))
        widths.add(batch.x.tokens.shape[2])
        assert bool(told.base.of(batch)) == (batch.x.tokens.shape[2] == L)
        (a, _), (b, _) = gradients(told, step), gradients(reading, step)
        assert abs(a - b) < 1e-6
    assert widths == {2, 4}


def test_a_wrong_number_would_be_seen(world):
    lm, _, train, validation = world
    told, reading = (task_of(lm, train, validation)[0] for _ in range(2))
    told.base._data.fill_(-1.0)
    reading.base = None
    assert abs(gradients(told, 1)[0] - gradients(reading, 1)[0]) > 1e-3


def test_interrupted_training_ends_with_the_same_bits(world, tmp_path):
    lm, _, train, validation = world
    lm = base(torch.float32)
    task, steps = task_of(lm, train, validation)
    losses = [record.loss for record in fit(task, steps, tmp_path / "whole", Rng(1))]
    first, _ = task_of(lm, train, validation)
    part = fit(first, steps, tmp_path / "parts", Rng(1))
    begun = [next(part).loss for _ in range(3)]
    part.close()
    again, _ = task_of(lm, train, validation)
    rest = [record.loss for record in fit(again, steps, tmp_path / "parts", Rng(1))]
    assert begun + rest == losses
    assert all(map(math.isfinite, losses))
    for a, b in zip(task.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["unit", "prefix once", "log-ratio"])
def test_a_shared_prefix_has_the_gradients_of_separate_strings(kind, monkeypatch):
    lm = base()
    energy = {
        "unit": lambda: Unit(UnitEnergy(over="all"), lm),
        "prefix once": lambda: Bit.from_base(BitEnergy(prefix_once=True, over="all"), lm),
        "log-ratio": lambda: LogRatio(LogRatioEnergy(), lm),
    }[kind]()
    with torch.no_grad():
        energy.readout.weight.copy_(Rng(1).normal(1, 16))
        for i, weight in enumerate(energy.trunk.parameters()):  # away from the base, where log-ratios are 0
            weight.add_(0.1 * Rng(2).child(i).normal(*weight.shape))
    tokens = (Rng(4).uniform(3, P + 4 * L) * V).long()
    contexts = Sequences(tokens[:, :P], torch.full((3,), P))
    x = Continuations(contexts, tokens[:, P:].view(3, 4, L), torch.full((3, 4), L))
    alone = Continuations(contexts[torch.arange(12) // 4], x.tokens.reshape(12, 1, L), x.lengths.view(12, 1))
    found, rows, states = [], [], energy.trunk._read
    monkeypatch.setattr(energy.trunk, "_read", lambda contexts: rows.append(len(contexts)) or states(contexts))
    for strings in (x, alone):
        energy.zero_grad()
        energy(strings).view(3, 4).square().sum().backward()
        found.append([None if weight.grad is None else weight.grad.clone() for weight in energy.parameters()])
    assert rows == [3, 12]
    for a, b in zip(*found, strict=True):
        # Llama's norms compute in float32
        assert (a is None and b is None) or (a - b).abs().max() < 1e-5 * a.abs().max()
    assert sum(float(a.abs().sum()) for a in found[0] if a is not None) > 0.1
