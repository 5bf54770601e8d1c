"""The law of the noise reaches the objective: training aims at P_data whatever the noise; a learned noise trains along.

Exact expectations over all strings, and short trainings in a world of 9 strings.
"""

import numpy as np
import pytest
import torch
from torch import nn

from freenergy import (
    BinaryNCE,
    Continuations,
    RankingNCE,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Truncation,
    UserError,
)
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise.from_lm import FromLM, Learned
from freenergy.noise.mixture import Mixture
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.testing.enumerating import everything
from freenergy.training.contrastive_batches import ContrastiveBatch, FreshContrast, NoiseLaw, StoredContrast, scores_of
from freenergy.training.loop import fit
from freenergy.training.settings import EnergyTraining, Optimisation
from freenergy.training.tasks.contrastive import ContrastiveTask
from tables import NgramLogits

V, L = 3, 2
SPACE = SequenceSpace(vocab_size=V, length=L)
BASE, TRUTH = (TabularLM.random(Rng(seed), vocab_size=V, order=1) for seed in (1, 2))
S = SPACE.size


def learned(seed=5, rate=1.0):
    q = NgramLogits(vocab_size=V, order=1)
    with torch.no_grad():
        q.logits.copy_(0.5 * Rng(seed).normal(V, V))
    return Learned(q, q, BASE, SPACE, rate=rate)


NOISES = {
    "tempered": lambda: FromLM(BASE, SPACE, Truncation(temperature=0.5)),
    "another model": lambda: FromLM(TabularLM.random(Rng(7), vocab_size=V, order=1), SPACE),
    "learned": learned,
    "mixture": lambda: Mixture([(FromLM(BASE, SPACE, Truncation(top_k=1)), 1), (FromLM(BASE, SPACE), 3)]),
}


def expected_gradient(objective, noise, E, *, has_law=True, carries_numbers=True):
    """∇_E of the expectation over a datum and a draw, through ``NoiseLaw``, ``Batch`` and ``scores_of``."""
    every = everything([[1]], SPACE)
    datum, other = torch.arange(S).repeat_interleave(S), torch.arange(S).repeat(S)
    pairs = torch.stack([datum, other], dim=1)
    x = Continuations(Sequences.from_lists([[1]] * S * S), every.tokens[0][pairs], every.lengths[0][pairs])
    log_q = noise.log_noise(every)[0].detach()
    numbers = BASE.log_prob(every)[0][other].unsqueeze(1), log_q[other].unsqueeze(1)
    batch = ContrastiveBatch(x, torch.arange(S * S), None, *(numbers if carries_numbers else (None, None)))
    values = E[pairs].requires_grad_()
    objective(*scores_of(values, NoiseLaw(noise, BASE).of(batch) if has_law else None)).value.backward()
    weight = (TRUTH.log_prob(every)[0][datum] + log_q[other]).exp().unsqueeze(1) * len(pairs)
    return torch.zeros(S, dtype=torch.float64).index_add_(0, pairs.flatten(), (weight * values.grad).flatten())


@pytest.mark.parametrize("objective", [BinaryNCE(), BinaryNCE(noise_ratio=3.0), RankingNCE()], ids=str)
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("carries_numbers", [True, False])
def test_the_optimum_is_the_truth_for_noise_that_is_not_the_base(objective, name, carries_numbers):
    every, noise = everything([[1]], SPACE), NOISES[name]()
    optimum = BASE.log_prob(every)[0] - TRUTH.log_prob(every)[0]  # log_score = log P_data
    numbers = {"carries_numbers": carries_numbers}
    assert expected_gradient(objective, noise, optimum, **numbers).abs().max() <= 1e-12
    assert expected_gradient(objective, noise, optimum, has_law=False).abs().max() > 1e-2  # the law is forgotten
    assert expected_gradient(objective, noise, -optimum, **numbers).abs().max() > 1e-2


def test_a_law_that_is_zero_on_some_text_is_refused():
    with pytest.raises(UserError, match="leave top_k and top_p out"):
        NoiseLaw(FromLM(BASE, SPACE, Truncation(top_k=1)), BASE).log_ratio(everything([[1]], SPACE))


class Table(nn.Module):
    """One parameter per string."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Parameter(torch.zeros(V, S, dtype=torch.float64))

    def forward(self, x):
        place = (x.tokens * V ** torch.arange(L - 1, -1, -1)).sum(-1)
        return self.energy[x.contexts.tokens[:, -1:], place]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Windows of one token and two more, which the truth has written, and validation draws of the base."""
    contexts = Sequences.from_lists([[i % V] for i in range(500)])
    stream = TRUTH.sample(contexts, 1, SPACE, Rng(3)).x.joined().tokens.numpy().ravel()
    windows = Windows(stream, places_of(np.arange(500) * (1 + L), L, np.arange(500)), 1, L)
    marks = {"lm": "a", "tokenizer": "b", "corpus": "c", "sources": "d", "seed": 0}
    identity = Identity(**marks, split="validation", per_prefix=7, space=SPACE)
    folder = tmp_path_factory.mktemp("validation")
    NegativeShards(folder, torch.arange(400, 500), windows, FromLM(BASE, SPACE), identity, Rng(5)).write(Silent())
    return windows, StoredContrast(windows, NegativeStore.open(folder, identity))


def task_of(world, noise, **optimisation):
    windows, validation = world
    steps = {"steps": 12, "batch_size": 40, "learning_rate": 0.02, "warmup": 0, "weight_decay": 0.0}
    steps |= {"validate_every": 6, "checkpoint_seconds": 0.0, "schedule": "constant", "clip": 0.0}
    settings = EnergyTraining(optimisation=Optimisation(**steps | optimisation), negatives=4)
    train = FreshContrast(windows, torch.arange(400), noise)
    return ContrastiveTask(Table(), train, validation, BinaryNCE(), settings, Rng(1), law=NoiseLaw(noise, BASE))


def trained(task, folder):
    return list(fit(task, task.settings.optimisation, folder, Rng(4)))


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_a_learned_noise_has_a_rate_of_its_own(world, tmp_path, rate):
    noise = learned(rate=rate)
    before = noise.lm.logits.detach().clone()
    task = task_of(world, noise, steps=1, validate_every=1)
    trained(task, tmp_path)
    moved = (noise.lm.logits - before).abs().max().item()
    assert moved == pytest.approx(0.02 * rate, rel=1e-3, abs=1e-9)  # the first step of Adam is the learning rate
    assert task.energy.energy.abs().max().item() == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("stop", [1, 7])
def test_a_learned_noise_resumes_with_the_same_bits(world, tmp_path, stop):
    whole = task_of(world, learned())
    records = trained(whole, tmp_path / "whole")
    assert records[-1].metrics["noise_cross_entropy"] < records[0].metrics["noise_cross_entropy"]
    cut = task_of(world, learned())
    for _ in zip(range(stop), fit(cut, cut.settings.optimisation, tmp_path / "cut", Rng(4)), strict=False):
        pass
    again = task_of(world, learned(seed=6))  # whatever it starts from, the checkpoint has the noise
    trained(again, tmp_path / "cut")
    for name in ("checkpoint.safetensors", "best.safetensors"):
        assert file_hash(tmp_path / "whole" / name) == file_hash(tmp_path / "cut" / name)
    assert torch.equal(whole.law.noise.lm.logits, again.law.noise.lm.logits)
    assert torch.equal(whole.energy.energy, again.energy.energy)


class Counting:
    """A noise that carries a state: how many batches it has drawn, which shifts its stream."""

    def init(self, rng):
        return {"drawn": torch.zeros((), dtype=torch.int64)}

    def draw(self, model, state, data, num, rng):
        _, draws = FromLM(BASE, SPACE).draw(model, {}, data, num, Rng(int(state["drawn"])))
        return {"drawn": state["drawn"] + 1}, draws

    def log_noise(self, x):
        return BASE.log_prob(x)


def test_the_state_of_a_noise_is_in_the_checkpoint(world, tmp_path):
    whole = task_of(world, Counting())
    trained(whole, tmp_path / "whole")
    cut = task_of(world, Counting())
    next(iter(fit(cut, cut.settings.optimisation, tmp_path / "cut", Rng(4))))
    again = task_of(world, Counting())
    trained(again, tmp_path / "cut")
    assert again.state == whole.state == {"drawn": 12}
    assert torch.equal(whole.energy.energy, again.energy.energy)
    with pytest.raises(UserError, match="set accumulate to 1"):
        task_of(world, Counting(), accumulate=2)
