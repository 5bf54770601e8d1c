"""Energies that judge unfinished continuations: fitted at several lengths, data and negatives cut alike.

optimum at every cut t:    E(x_≤t) = log P_LM(x_≤t) − log truth(x_≤t)  +  a constant of t
"""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from freenergy import Continuations, RankingNCE, Rng, Sequences, SequenceSpace, TabularLM, UserError, load, run
from freenergy.core.progress import Silent
from freenergy.core.roles import Loss, Scores
from freenergy.corpus import Corpus, Windows
from freenergy.corpus.windows import places_of
from freenergy.energies.features import FeatureEnergy
from freenergy.energies.ngram_features import NgramEnergy, NgramFeatures
from freenergy.energies.ngram_tables import NgramTables
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.recipes import load_run
from freenergy.recipes.load import make_recipe
from freenergy.recipes.stages.negatives import stored_identity
from freenergy.testing.enumerating import branches
from freenergy.training.contrastive_batches import ContrastiveBatch, StoredContrast, cut, cuts
from freenergy.training.convex import cross_fitted, fit_convex
from freenergy.training.feature_cache import FeatureCache, Pieces
from freenergy.training.settings import EnergyTraining, Optimisation
from freenergy.training.tasks import contrastive as task_module
from freenergy.training.tasks.contrastive import ContrastiveTask, Offset, own_energies, validation_of

V, L, K = 3, 3, 4
CONTEXT = Sequences.from_lists([[1]])
SPACES = {"fixed": SequenceSpace(vocab_size=V, length=L), "eos": SequenceSpace(vocab_size=V, length=L, eos=0)}
SPACE = SPACES["fixed"]
LM, TRUTH = (TabularLM.random(Rng(seed), vocab_size=V, order=1, spread=0.7) for seed in (1, 22))


def marginal(lm, strings):
    """log P(x_≤t) of strings, finished or not: their tokens' product."""
    x = Continuations.from_lists(CONTEXT.lists(), [[list(string) for string in strings]])
    return lm.log_prob(x)[0]


def strings_at(space, t):
    """All different strings of the space, cut to t tokens."""
    return sorted({tuple(string[:t]) for string in space.enumerate().lists()})


class Table(nn.Module):
    """One number for every string, finished or not."""

    def __init__(self, strings, values):
        super().__init__()
        self.places = {string: i for i, string in enumerate(strings)}
        self.energy = nn.Parameter(values.clone())

    def forward(self, x):
        index = torch.tensor([[self.places[tuple(string)] for string in row] for row in x.lists()])
        return self.energy[index]


def test_cuts_are_evenly_spaced_and_the_last_is_whole():
    assert cuts(40, 1) == (40,)
    assert cuts(40, 4) == (10, 20, 30, 40)
    assert cuts(7, 3) == (3, 5, 7)
    assert cuts(3, 3) == (1, 2, 3)
    for length, num in itertools.product(range(1, 12), range(1, 12)):
        if num <= length:
            found = cuts(length, num)
            assert len(set(found)) == num
            assert found[-1] == length
    with pytest.raises(UserError, match="cannot be fitted at 5 lengths of continuations of 4 tokens"):
        cuts(4, 5)
    with pytest.raises(UserError, match="lengths is 0: set it to 1 or more"):
        EnergyTraining(lengths=0)


def test_a_cut_keeps_what_has_ended():
    x = Continuations.from_lists([[1]], [[[2, 1, 2], [1, 0], [2]]])
    assert cut(x, 2).lists() == [[[2, 1], [1, 0], [2]]]
    assert cut(x, 3).lists() == x.lists()


class Population:
    """Every pair of a datum and a negative, as a contrast; its objective weighs each by its probability."""

    kind = "population"

    def __init__(self, space):
        self.strings = [tuple(string) for string in space.enumerate().lists()]
        self.pairs = list(itertools.product(range(len(self.strings)), repeat=2))
        truth, base = (marginal(lm, self.strings).exp() for lm in (TRUTH, LM))
        self.weight = torch.stack([truth[i] * base[j] for i, j in self.pairs])

    def __len__(self):
        return len(self.pairs)

    def init(self, rng):
        return {}

    def batch(self, index, num, rng, state=None):
        rows = [[self.strings[i], self.strings[j]] for i, j in self.pairs]
        x = Continuations.from_lists([[1]] * len(rows), rows)
        return ContrastiveBatch(x, index)

    def __call__(self, data, negatives):
        """The expectation of ranking against one negative, which is also that of a logistic regression of pairs."""
        return Loss((self.weight * nn.functional.softplus(negatives.logit - data.logit)[:, 0]).sum(), {})


def population_gradient(space, validation, values, strings, lengths=L):
    """∇ of the expected loss of one training step, over pairs and over the cuts that the step may draw."""
    world = Population(space)
    settings = EnergyTraining(lengths=lengths, optimisation=Optimisation(batch_size=1))
    table = Table(strings, values)
    task = ContrastiveTask(table, world, validation, world, settings, Rng(0))
    task._index = lambda step, micro: torch.arange(len(world))
    total = torch.zeros_like(values)
    for probability, (gradient,) in branches(
        lambda rng: torch.autograd.grad(task.loss(1, 0, rng).value, [table.energy])
    ):
        total += probability * gradient
    return total


@pytest.mark.parametrize("name", SPACES)
def test_the_population_optimum_of_every_cut_is_the_log_ratio_of_marginals(name, world, monkeypatch):
    *_, validation = world
    space = SPACES[name]
    strings = sorted({string for t in range(1, L + 1) for string in strings_at(space, t)})
    optimum = marginal(LM, strings) - marginal(TRUTH, strings)
    assert population_gradient(space, validation, optimum, strings).abs().max() <= 1e-12
    if name == "fixed":  # no cut is compared with another, so each has a constant of its own
        moved = optimum + torch.tensor([float(len(string)) for string in strings], dtype=torch.float64)
        assert population_gradient(space, validation, moved, strings).abs().max() <= 1e-12
    for i in (0, len(strings) // 2, len(strings) - 1):
        wrong = optimum.clone()
        wrong[i] += 1
        assert population_gradient(space, validation, wrong, strings).abs().max() > 1e-3
    whole_alone = population_gradient(space, validation, optimum.flip(0), strings, lengths=1)
    short = [i for i, string in enumerate(strings) if len(string) < L and string[-1] != space.eos]
    assert whole_alone[short].abs().max() == 0  # one length: unfinished strings are not seen
    monkeypatch.setattr(task_module, "cut", cut_data_alone)
    assert population_gradient(space, validation, optimum, strings).abs().max() > 1e-3


def cut_data_alone(x, length):
    """Mutant: negatives stay whole."""
    lengths = x.lengths.clone()
    lengths[:, 0] = lengths[:, 0].clamp(max=length)
    return Continuations(x.contexts, x.tokens, lengths)


class OneHot(FeatureEnergy):
    """One weight for every string, finished or not."""

    def __init__(self, strings):
        self.strings = {string: i for i, string in enumerate(strings)}
        super().__init__(NgramEnergy(), [str(string) for string in strings])

    def features(self, x, *, leave_self_out=False):
        index = torch.tensor([[self.strings[tuple(string)] for string in row] for row in x.lists()])
        return nn.functional.one_hot(index, len(self.strings)).double()


class Weighted:
    """Binary NCE with exact expectations: a row is one string of one cut, weighted as datum and as noise."""

    kind = "weighted"

    def __init__(self, data, noise):
        self.data, self.noise = data, noise

    def __call__(self, data, negatives):
        value = -(self.data * nn.functional.logsigmoid(data.logit[:, 0])).sum()
        return Loss(value - (self.noise * nn.functional.logsigmoid(-negatives.logit[:, 0])).sum(), {})


def test_stacked_cuts_of_a_linear_energy_reach_the_log_ratio_of_marginals():
    by_cut = [strings_at(SPACE, t) for t in cuts(L, 3)]
    strings = [string for rows in by_cut for string in rows]
    energy = OneHot(strings)
    parts = [energy.features(Continuations.from_lists([[1]] * len(rows), [[x] for x in rows])) for rows in by_cut]
    stacked, log_base, log_truth = torch.cat(parts), marginal(LM, strings), marginal(TRUTH, strings)
    both = torch.cat([stacked, stacked], dim=1)
    fit_convex(
        [energy], [Pieces(tuple(both.shape), lambda: iter([both]))], Weighted(log_truth.exp(), log_base.exp()), 1e-12
    )
    found = energy(Continuations.from_lists([[1]], [[list(x) for x in strings]]))[0].detach()
    torch.testing.assert_close(found, log_base - log_truth, atol=1e-3, rtol=0)


def test_all_cuts_of_a_window_are_left_out_together():
    """Features that name the window: a fit that has not seen the window at any cut cannot tell its datum."""
    M, C = 6, 2
    names = torch.eye(M, dtype=torch.float64).repeat(C, 1)  # cut after cut
    both = torch.cat([names.unsqueeze(1), torch.zeros(M * C, 2, M, dtype=torch.float64)], dim=1)
    features = Pieces(tuple(both.shape), lambda: iter([both]))
    part = OneHot(list(range(M)))
    told = [cross_fitted([part], [features], RankingNCE(), 0.01, cuts=num) for num in (C, 1)]
    margins = [(E[:, :1] - E[:, 1:]).abs().max().item() for E in told]
    assert margins[0] <= 1e-9
    assert margins[1] > 0.1  # mutant: the other cut of the window stays in


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Windows that a truth has written, with stored negatives: a training and a validation contrast."""
    count = 60
    x = TRUTH.sample(Sequences.from_lists([[i % V] for i in range(count)]), 1, SPACE, Rng(3)).x
    stream = x.joined().tokens.numpy().ravel()
    starts = np.arange(count) * (1 + L)
    places = places_of(starts, L, np.arange(count))
    windows, stored = Windows(stream, places, 1, L), []
    for split, rows in (("train", torch.arange(40)), ("validation", torch.arange(40, 60))):
        marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
        identity = Identity(**marks, split=split, per_prefix=K, space=SPACE)
        folder = tmp_path_factory.mktemp(split)
        NegativeShards(folder, rows, windows, FromLM(LM, SPACE), identity, Rng(5)).write(Silent())
        stored.append(StoredContrast(windows, NegativeStore.open(folder, identity)))
    return windows, *stored


def counted(seed):
    stream = np.array([1, 2, 0, 2, 2, 1, 0] * 5)
    energy = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=V, eos=0, order=2))
    with torch.no_grad():
        energy.weight.copy_(0.1 * Rng(seed).normal(len(energy.names)))
    return energy


def test_features_of_different_cuts_are_kept_apart(world, tmp_path):
    _, train, _ = world
    energy, every = counted(1), torch.arange(len(train))
    marks = []
    for length in (None, 1, 2):
        cache = FeatureCache(tmp_path, train, leave_self_out=False, length=length)
        x = train.all(every) if length is None else cut(train.all(every), length)
        for _ in range(2):  # computed, then from disk
            torch.testing.assert_close(cache.all_energies(energy, rows=64), energy(x).detach(), atol=1e-5, rtol=0)
        marks.append({path.name for path in tmp_path.iterdir()})
    assert [len(found) for found in marks] == [1, 2, 3]
    before = FeatureCache(tmp_path, train, leave_self_out=False).all_energies(energy, rows=64)
    table = Table(strings_at(SPACE, 2), Rng(4).normal(V**2))
    short = FeatureCache(tmp_path, train, leave_self_out=False, length=2).all_energies(table, rows=64)
    torch.testing.assert_close(short, table(cut(train.all(every), 2)).detach())
    assert (before[:, 0] != short[:, 0]).any()


def test_a_network_learns_at_a_random_cut_on_top_of_what_the_others_say_there(world, tmp_path):
    _, train, validation = world
    done = counted(1)
    settings = EnergyTraining(lengths=3, negatives=2, optimisation=Optimisation(batch_size=8))
    strings = sorted({string for t in range(1, L + 1) for string in strings_at(SPACE, t)})
    caches = [FeatureCache(tmp_path, train, leave_self_out=True, length=t) for t in (1, 2, None)]
    held_out = FeatureCache(tmp_path, validation, leave_self_out=False).all_energies(done, rows=64)
    offset = Offset(done, torch.cat([cache.all_energies(done, rows=64) for cache in caches]), held_out)
    new = Table(strings, torch.zeros(len(strings), dtype=torch.float64))
    task, seen = ContrastiveTask(new, train, validation, RankingNCE(), settings, Rng(1), offset), set()
    for step in range(1, 20):
        rng = Rng(2).child("step", step)
        batch = task._cut(train.batch(task._index(step, 0), 2, rng), rng)
        seen.add(batch.x.tokens.shape[2])
        own = own_energies(done, batch.x)
        torch.testing.assert_close(offset.of(batch), own, atol=1e-5, rtol=0)
        wanted = RankingNCE()(Scores.relative(own[:, :1]), Scores.relative(own[:, 1:])).value.item()
        assert task.loss(step, 0, rng).value.item() == pytest.approx(wanted, abs=1e-5)
    assert seen == {1, 2, 3}
    assert task.validate().value == validation_of(held_out, RankingNCE()).value  # whole continuations


def test_one_length_trains_as_ever(world):
    """The default neither draws a cut nor changes a batch."""
    _, train, validation = world
    task = ContrastiveTask(
        Table(strings_at(SPACE, L), torch.zeros(V**L).double()), train, validation, RankingNCE(),
        EnergyTraining(optimisation=Optimisation(batch_size=8)), Rng(1),
    )  # fmt: skip
    batch = train.batch(torch.arange(8), 2, Rng(3))
    assert task._cut(batch, Rng(3)) is batch


def recipe(folder, **changes):
    """Lines of words that depend on the two before, and a base that knows single words only."""
    truth = TabularLM.random(Rng(7), vocab_size=6, order=2, spread=2.0)
    space = SequenceSpace(vocab_size=6, length=24)
    lines = truth.sample(Sequences.from_lists([[]]), 300, space, Rng(8)).x.lists()[0]
    path = folder / "lines.txt"
    path.write_text("".join(" ".join("abcdef"[token] for token in line) + "\n" for line in lines))
    shares = {"validation_share": 0.2, "test_share": 0.2}
    return make_recipe(
        {
            "name": "lengths",
            "seed": 1,
            "corpus": {"source": str(path), "documents": "line", "prefix": 4, "continuation": 4, "deduplicate": 0}
            | shares,
            "tokenizer": {"kind": "words"},
            "base": {"kind": "ngram", "order": 1},
            "negatives": {"per_prefix": 4, "windows": 150, "validation_windows": 40, "validation_per_prefix": 7},
            "energy": {"kind": "ngram", "order": 3, "lexicon": 4},
        }
        | changes,
        origin="test",
    )


def mean_loss(this, energy, length):
    """Of ranking, on the stored training windows at one cut; the datum does not find itself in the text."""
    corpus = Corpus.open(this.stage("corpus"))
    store = NegativeStore.open(this.stage("negatives") / "train", stored_identity(this, corpus, "train"))
    contrast = StoredContrast(corpus.windows("train"), store)
    E = own_energies(energy, cut(contrast.all(torch.arange(len(contrast))), length)).detach()
    return RankingNCE()(Scores.relative(E[:, :1]), Scores.relative(E[:, 1:])).value.item()


def test_a_run_with_lengths_tells_the_gain_at_each(tmp_path):
    summaries, losses = {}, {}
    for lengths in (1, 2):
        folder = tmp_path / str(lengths)
        *_, result = run(recipe(tmp_path, training={"lengths": lengths}), folder, stage="energy")
        summaries[lengths], energy = result.summary, load(folder).energy
        losses[lengths] = [mean_loss(load_run(folder), energy, t) for t in (2, 4)]
    assert "certified_gain_by_length" not in summaries[1]
    gains = summaries[2]["certified_gain_by_length"]
    assert list(gains) == ["2", "4"]
    assert gains["4"] == summaries[2]["validation"]["certified_gain"]
    assert 0.1 < gains["2"] < gains["4"]
    assert losses[2][0] < losses[1][0] - 0.01  # at two tokens the one that was fitted there is better
    assert sum(losses[2]) < sum(losses[1])
    marks = [len(list((tmp_path / str(lengths) / "features").iterdir())) for lengths in (1, 2)]
    assert marks == [2, 4]  # train and validation whole, and both at two tokens


def test_a_network_follows_linear_parts_at_all_lengths(tmp_path):
    parts = [{"kind": "ngram", "order": 2, "lexicon": 4}, {"kind": "log-ratio"}]
    steps = {"steps": 8, "batch_size": 4, "validate_every": 4}
    settings = {
        "base": {"preset": "tiny", "block": 12, "validation_tokens": 200, "optimisation": steps},
        "energy": {"kind": "product", "parts": parts},
        "negatives": {"per_prefix": 2, "windows": 20, "validation_windows": 10, "validation_per_prefix": 3},
        "training": {"lengths": 2, "negatives": 2, "optimisation": steps},
    }
    *_, result = run(recipe(tmp_path, **settings), tmp_path / "run", stage="energy")
    assert [part["kind"] for part in result.summary["parts"]] == ["ngram", "log-ratio"]
    assert result.summary["parts"][1]["steps"] == 8
    assert set(result.summary["certified_gain_by_length"]) == {"2", "4"}
    left = load_file(tmp_path / "run/energy/linear-energies.safetensors")["energy"]
    assert left.shape == (2 * 20, 3)  # windows at two tokens, then whole
