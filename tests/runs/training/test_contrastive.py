"""Training an energy by contrast: what is chosen, what is minimised, what is said."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from freenergy import Continuations, RankingNCE, Rng, Scores, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.energies.ngram_features import NgramEnergy, NgramFeatures
from freenergy.energies.ngram_tables import NgramTables
from freenergy.energies.product import Product
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.training.contrastive_batches import FreshContrast, StoredContrast
from freenergy.training.feature_cache import FeatureCache
from freenergy.training.loop import StepRecord, fit
from freenergy.training.settings import EnergyTraining, Optimisation
from freenergy.training.tasks.contrastive import ContrastiveTask, Offset, Watch, validation_of

V, L, K = 4, 3, 5
SPACE = SequenceSpace(vocab_size=V, length=L)


class Table(nn.Module):
    """One parameter a string."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Parameter(torch.zeros(V**L, dtype=torch.float64))

    def forward(self, x):
        place = (x.tokens * V ** torch.arange(L - 1, -1, -1)).sum(-1)
        return self.energy[place]


def windows_of(truth, count):
    """Windows of one token and three more, which a truth has written."""
    contexts = Sequences.from_lists([[i % V] for i in range(count)])
    x = truth.sample(contexts, 1, SPACE, Rng(3)).x
    stream = x.joined().tokens.numpy().ravel()
    starts = np.arange(count) * (1 + L)
    places = places_of(starts, L, np.arange(count))
    return Windows(stream, places, 1, L)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    lm, truth = (TabularLM.random(Rng(seed), vocab_size=V, order=0, spread=1.0) for seed in (1, 2))
    windows, stored = windows_of(truth, 600), []
    for split, rows in (("train", torch.arange(400)), ("validation", torch.arange(400, 600))):
        marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
        identity = Identity(**marks, split=split, per_prefix=K, space=SPACE)
        folder = tmp_path_factory.mktemp(split)
        NegativeShards(folder, rows, windows, FromLM(lm, SPACE), identity, Rng(5)).write(Silent())
        stored.append(StoredContrast(windows, NegativeStore.open(folder, identity)))
    return lm, truth, windows, *stored


def settings(**changes):
    steps = {"steps": 300, "batch_size": 20, "learning_rate": 0.05, "warmup": 10, "validate_every": 50}
    optimisation = Optimisation(**steps | {key: changes.pop(key) for key in list(changes) if key in steps})
    return EnergyTraining(optimisation=optimisation, **changes)


def test_stored_contrast_is_datum_first_and_a_choice_of_its_negatives(world):
    *_, train, _ = world
    index = torch.tensor([7, 3, 399])
    batch = train.batch(index, 2, Rng(0))
    x = batch.x
    every = train.all(index)
    assert x.shape == (3, 3)
    assert every.shape == (3, 1 + K)
    for b in range(3):
        mine, all_of_them = x.lists()[b], every.lists()[b]
        assert mine[0] == all_of_them[0]
        assert all(negative in all_of_them[1:] for negative in mine[1:])
    assert torch.equal(x.tokens, every.tokens[torch.arange(3).unsqueeze(1), batch.columns])
    seen = torch.stack([train.batch(index, 2, Rng(s)).x.tokens for s in range(30)])
    assert (seen != seen[0]).any(), "every step chose the same negatives"
    assert torch.equal(train.batch(index, 2, Rng(4)).x.tokens, train.batch(index, 2, Rng(4)).x.tokens)
    with pytest.raises(UserError, match=r"takes 9 negatives of each prefix but 5 are stored"):
        train.batch(index, 9, Rng(0))


def test_fresh_contrast_draws_anew(world):
    lm, _, windows, *_ = world
    fresh = FreshContrast(windows, torch.arange(100), FromLM(lm, SPACE))
    index = torch.arange(10)
    first, again, other = (fresh.batch(index, K, Rng(0).child("step", s)).x for s in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.tokens[:, 0], windows.continuations(slice(0, 10)).tokens[:, 0])


def test_it_learns_the_log_ratio(world, tmp_path):
    lm, truth, _, train, validation = world
    task = ContrastiveTask(Table(), train, validation, RankingNCE(), settings(negatives=K), Rng(1))
    records = list(fit(task, task.settings.optimisation, tmp_path, Rng(1)))
    assert records[-1].validation < -0.25
    space = SPACE.enumerate()
    x = Continuations(Sequences.from_lists([[1]]), space.tokens[None], space.lengths[None])
    log_p = (lm.log_prob(x) - task.module(x)).log_softmax(-1)
    kl = [(truth.log_prob(x).exp() * (truth.log_prob(x) - q)).sum().item() for q in (lm.log_prob(x), log_p)]
    assert kl[0] > 0.2
    assert kl[1] < 0.3 * kl[0]


def test_an_epoch_sees_every_window_once(world):
    *_, train, validation = world
    task = ContrastiveTask(Table(), train, validation, RankingNCE(), settings(), Rng(1))
    epoch = torch.cat([task._index(step, 0) for step in range(1, 21)])
    assert sorted(epoch.tolist()) == list(range(400))
    assert epoch.tolist() != torch.cat([task._index(step, 0) for step in range(21, 41)]).tolist()


def test_the_offset_is_added_and_does_not_learn(world):
    *_, train, validation = world
    done = Table()
    with torch.no_grad():
        done.energy.copy_(Rng(9).normal(V**L))
    every, held = (contrast.all(torch.arange(len(contrast))) for contrast in (train, validation))
    numbers = Offset(done, done(every).detach(), done(held).detach())
    task = ContrastiveTask(Table(), train, validation, RankingNCE(), settings(), Rng(1), offset=numbers)
    loss = task.loss(1, 0, Rng(2))
    x = train.batch(task._index(1, 0), 4, Rng(2)).x
    E = done(x)
    read = ContrastiveTask(Table(), train, validation, RankingNCE(), settings(), Rng(1), Offset(done, None, done(held)))
    assert read.loss(1, 0, Rng(2)).value.item() == pytest.approx(loss.value.item())
    assert loss.value.item() == pytest.approx(
        RankingNCE()(Scores.relative(E[:, :1]), Scores.relative(E[:, 1:])).value.item()
    )
    loss.value.backward()
    assert done.energy.grad is None
    assert task.module.energy.grad.abs().sum() > 0
    assert task.validate().value == pytest.approx(validation_of(done(held), RankingNCE()).value)


def test_the_penalty_on_energies(world):
    *_, train, validation = world
    energy = Table()
    with torch.no_grad():
        energy.energy.copy_(Rng(9).normal(V**L))
    plain, fined = (
        ContrastiveTask(energy, train, validation, RankingNCE(), settings(energy_l2=weight), Rng(1)).loss(1, 0, Rng(2))
        for weight in (0.0, 0.5)
    )
    x = train.batch(
        ContrastiveTask(energy, train, validation, RankingNCE(), settings(), Rng(1))._index(1, 0), 4, Rng(2)
    ).x
    assert (fined.value - plain.value).item() == pytest.approx(0.5 * (energy(x) ** 2).mean().item())


def test_fewer_windows_than_a_batch_is_one_sentence(world):
    *_, train, validation = world
    with pytest.raises(UserError, match="there are 400 training windows but a batch has 500"):
        ContrastiveTask(Table(), train, validation, RankingNCE(), settings(batch_size=500), Rng(1))


def test_an_energy_that_returns_nan_names_the_class_and_the_step(world):
    *_, train, validation = world
    task = ContrastiveTask(Table(), train, validation, RankingNCE(), settings(), Rng(1))
    with torch.no_grad():
        task.module.energy.fill_(math.nan)
    with pytest.raises(UserError, match=r"Table returned nan for continuation 0 of context 0 in the batch of step 3"):
        task.loss(3, 0, Rng(0))


class Listener:
    def __init__(self):
        self.said = []

    def track(self, label, total=None, unit=""):
        raise AssertionError

    def say(self, message):
        self.said.append(message)


def step(number, gain, accuracy):
    metrics = {"accuracy_data": 0.5, "accuracy_noise": 0.5, "energy_data": 0.0, "energy_noise": 0.0, "spread": 0.1}
    held_out = {"pair_accuracy": accuracy, "gain_error": 0.01}
    return StepRecord(number, 1.6, 1e-3, 1.0, 0.1, metrics, validation=-gain, validation_metrics=held_out)


def test_the_live_line_and_the_word_about_chance():
    listener = Listener()
    watch = Watch(listener, tokens_per_sequence=40.0, pairs_per_step=100)
    line = watch.line(step(10, 2.0, 0.8))
    assert "certified gain 2.00 nats (-4.9 % perplexity)" in line
    assert "1000 pairs/s" in line
    watch.line(step(60, 0.5, 0.7))
    watch.line(step(40, 0.001, 0.501))
    assert listener.said == []
    watch.line(step(60, 0.001, 0.501))
    watch.line(step(70, 0.001, 0.501))
    (said,) = listener.said
    assert "still at chance after 6,000 pairs" in said
    assert "log-ratio" in said


def ngram_energy(weight_seed):
    stream = np.array([1, 2, 3, 0, 2, 2, 1, 0] * 5)
    energy = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=V, eos=0, order=2))
    with torch.no_grad():
        energy.weight.copy_(0.1 * Rng(weight_seed).normal(len(energy.names)))
    return energy


def test_features_are_read_once_and_energies_are_those_of_reading(world, tmp_path, monkeypatch):
    *_, train, _ = world
    cache = FeatureCache(tmp_path, train, leave_self_out=False, batch_size=150)
    first, other, table = ngram_energy(1), ngram_energy(2), Table()
    product = Product([first, table, other], [1.0, 2.0, -0.5])
    with torch.no_grad():
        table.energy.copy_(Rng(3).normal(V**L))
    read = product(train.all(torch.arange(len(train)))).detach()
    torch.testing.assert_close(cache.all_energies(product, rows=64), read, atol=1e-5, rtol=0)
    files = {path: file_hash(path) for path in tmp_path.rglob("*.safetensors")}
    assert len(files) == 3  # both n-gram energies read alike, in three chunks

    def refuse(*_, **__):
        raise AssertionError("features were computed twice")

    monkeypatch.setattr(NgramFeatures, "features", refuse)
    torch.testing.assert_close(cache.all_energies(product, rows=64), read, atol=1e-5, rtol=0)
    own = FeatureCache(tmp_path, train, leave_self_out=True, batch_size=150)
    with pytest.raises(AssertionError, match="computed twice"):
        own.all_energies(first, rows=64)  # leaving the own text out is another reading


def test_an_offset_does_not_find_the_datum_in_its_own_text(world, tmp_path):
    """What a network learns on top of counts is read with the datum left out, stored or fresh."""
    lm, _, windows, train, _ = world
    stream = train.all(torch.arange(len(train))).candidates(slice(0, 1)).joined().tokens.numpy()
    stream = np.concatenate([stream, np.zeros((len(stream), 1), dtype=stream.dtype)], axis=1).ravel()
    energy = NgramFeatures(NgramEnergy(order=3), NgramTables.fit(stream, vocab_size=V, eos=0, order=3))
    with torch.no_grad():
        energy.weight.copy_(Rng(1).normal(len(energy.names)))
    index = torch.arange(7)
    x = train.all(index)
    own = energy.energy_of(energy.features(x.candidates(slice(0, 1)), leave_self_out=True))
    assert (own - energy(x)[:, :1]).abs().max() > 1e-3
    table = FeatureCache(tmp_path, train, leave_self_out=True).all_energies(Product([energy]), rows=64)
    stored = Offset(Product([energy]), table, table).of(train.batch(index, K, Rng(0)))
    fresh = FreshContrast(windows, torch.arange(100), FromLM(lm, SPACE)).batch(index, K, Rng(0))
    for found in (stored, Offset(Product([energy]), None, table).of(fresh)):
        torch.testing.assert_close(found[:, :1], own.detach(), atol=1e-4, rtol=0)
