"""Networks of whole sentences: the loss against the convex fit's, the optimum, what is kept, and resuming."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from freenergy import NgramLM, Rng, UserError
from freenergy.core.sentences import Sentences
from freenergy.energies.discrete import Discrete
from freenergy.energies.heads import HeadSettings, NeuralHead
from freenergy.energies.mixed import Mixed, head_potential, padded
from freenergy.energies.sparse.features import SparseFeatures, SparseSettings
from freenergy.noise.pool import Pool, draw_pool
from freenergy.training.loop import fit
from freenergy.training.settings import Optimisation
from freenergy.training.sparse_fit import SparseProblem
from freenergy.training.tasks.sentence_field import NetworkTraining, SentenceFieldTask, side_of

V, LONGEST = 6, 5
TEXT = Sentences.from_lists([[a, b, a, 0] for a in (1, 2, 3) for b in (4, 5)] * 10)
STEPS = Optimisation(
    steps=30, batch_size=60, learning_rate=0.03, warmup=0, weight_decay=0.0, clip=0.0, validate_every=10
)


def head_of(width=4, scale=0.0, seed=0, **more):
    torch.manual_seed(seed)
    head = NeuralHead(HeadSettings(width=width, **more), V)
    with torch.no_grad():
        head.scale.fill_(scale)
    return head


@pytest.fixture(scope="module")
def parts():
    """Features of the text, and as many draws of a bigram model as have exactly twice the sentences of the text."""
    lm = NgramLM.fit(TEXT.tokens, vocab_size=V, eos=0, order=2)
    pool = draw_pool(lm, LONGEST, 400, Rng(1))
    noise = Pool(pool.text.take(0, 2 * TEXT.num), 2 * TEXT.num + 30)
    features = SparseFeatures.fit(TEXT, SparseSettings(types=("w", "ws", "len"), classes=3), vocab_size=V, eos=0)
    return lm, noise, draw_pool(lm, LONGEST, 300, Rng(2)), features


def task_of(parts, head, *, fixed=None, steps=STEPS, features=True, **more):
    _, noise, fresh, table = parts
    texts = (TEXT, noise.text, TEXT, fresh.text)
    sides = [side_of(text, table.matrix(text) if features else None, fixed(text) if fixed else None) for text in texts]
    settings = NetworkTraining(parts="joint", optimisation=steps, **more)
    return SentenceFieldTask(
        head, *sides, draws=(noise.draws, fresh.draws), longest=LONGEST, settings=settings, rng=Rng(4)
    )


def test_one_batch_of_all_is_the_convex_loss_with_its_slope(parts):
    """λ, b and an offset of any size; the head is off: the loss of ``sparse_fit``, and not of another ν."""
    _, noise, _, features = parts
    at = np.random.default_rng(0).normal(size=features.num + 1)

    def offset(text):
        return np.sin(text.lengths.astype(float))

    task = task_of(parts, head_of(), fixed=offset, l2=0.02)
    with torch.no_grad():
        task.module.weights.copy_(torch.from_numpy(at[:-1]))
        task.module.bias.fill_(at[-1])
    found = task.loss(1, 0, Rng(0)).value
    found.backward()
    sides = features.matrix(TEXT), features.matrix(noise.text)
    offsets = offset(TEXT), offset(noise.text)
    problem = SparseProblem(*sides, offsets=offsets, noise_ratio=2.0, draws=noise.draws)
    value, slope = problem.value_and_slope(at, 0.02)
    assert found.item() == pytest.approx(value, rel=1e-5)
    assert task.module.weights.grad.tolist() == pytest.approx(slope[:-1].tolist(), abs=1e-5)
    assert task.module.bias.grad.item() == pytest.approx(slope[-1], abs=1e-5)
    wrong = SparseProblem(*sides, offsets=offsets, noise_ratio=1.0, draws=noise.draws).value_and_slope(at, 0.02)[0]
    cut = SparseProblem(*sides, offsets=offsets, noise_ratio=2.0, draws=noise.text.num).value_and_slope(at, 0.02)[0]
    assert min(abs(wrong - value), abs(cut - value)) > 1e-2 * value


def test_the_slope_of_the_head_is_that_of_finite_differences(parts):
    head = head_of(scale=0.7).double()
    task = task_of(parts, head, features=False)
    task.module.double()
    task.loss(1, 0, Rng(0)).value.backward()
    for name, weight in head.named_parameters():
        if not weight.requires_grad:
            assert weight.grad is None, name
            continue
        at = int(weight.grad.abs().argmax())
        flat, values = weight.data.view(-1), []
        for change in (1e-5, -2e-5):
            flat[at] += change
            values.append(task.loss(1, 0, Rng(0)).value.item())
        flat[at] += 1e-5
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(weight.grad.view(-1)[at].item(), rel=1e-4, abs=1e-9)


def test_joint_training_without_a_network_ends_at_the_convex_optimum(parts, tmp_path):
    _, noise, _, features = parts
    head = head_of()
    head.requires_grad_(False)
    steps = replace(STEPS, steps=400, learning_rate=0.05, final_share=0.0, validate_every=400)
    task = task_of(parts, head, steps=steps, l2=0.01, weights_rate=1.0)
    list(fit(task, steps, tmp_path, Rng(0)))
    problem = SparseProblem(features.matrix(TEXT), features.matrix(noise.text), noise_ratio=2.0, draws=noise.draws)
    _, value = problem.solve(0.01, np.zeros(problem.size), iterations=200)
    reached = problem.value_and_slope(np.append(task.weights, task.bias), 0.01)[0]
    assert reached == pytest.approx(value, abs=2e-3)
    assert reached < problem.value_and_slope(np.zeros(problem.size), 0.01)[0] - 0.1


def test_what_validation_says_is_the_certified_gain(parts):
    _, _, fresh, features = parts
    head, weights = head_of(scale=0.3), np.linspace(-1, 1, parts[3].num)
    task = task_of(parts, head)
    with torch.no_grad():
        task.module.weights.copy_(torch.from_numpy(weights))
        task.module.bias.fill_(0.2)
    energy = Mixed(head, Discrete(features, task.weights, 0.0, longest=LONGEST), task.bias, eos=0, longest=LONGEST)
    drawn, human = energy.potential(fresh.text), energy.potential(TEXT)
    n = fresh.draws + 1  # one more than the draws: the text itself is among the candidates
    sums = np.exp(drawn).sum() + np.exp(human)
    expected = (human + np.log(n) - np.log(sums)).mean()
    assert -task.validate().value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("with_features", [True, False])
def test_the_energy_is_minus_the_sum_of_its_parts_and_is_kept(parts, with_features, tmp_path):
    lm, _, _, features = parts
    head, weights = head_of(scale=0.5), np.linspace(-1, 1, features.num)
    discrete = Discrete(features, weights, 0.25, longest=LONGEST) if with_features else None
    energy = Mixed(head, discrete, -0.5, eos=0, longest=LONGEST)
    alone = [head.scale.item() * head.potential(*padded(TEXT, np.array([row]))).item() for row in range(TEXT.num)]
    assert head_potential(head, TEXT) == pytest.approx(np.array(alone), abs=1e-5)
    rest = features.potential(TEXT, weights) + 0.25 if with_features else 0.0
    assert energy.potential(TEXT) == pytest.approx(np.array(alone) - 0.5 + rest, abs=1e-5)
    x = TEXT.continuations()
    assert (-energy(x)[0]).numpy() == pytest.approx(energy.potential(TEXT), abs=1e-9)
    energy.save_pretrained(tmp_path / "energy")
    assert Mixed.from_pretrained(tmp_path / "energy", base=lm)(x).equal(energy(x))
    other = NeuralHead(HeadSettings(width=4), V + 1)
    if discrete is not None:
        with pytest.raises(UserError, match="one vocabulary"):
            Mixed(other, discrete, 0.0, eos=0, longest=LONGEST)


def test_a_killed_training_resumes_with_the_same_bits(parts, tmp_path):
    steps = replace(STEPS, steps=12, batch_size=20, validate_every=5, checkpoint_seconds=0.0)
    whole = task_of(parts, head_of(scale=0.1), steps=steps)
    list(fit(whole, steps, tmp_path / "whole", Rng(1)))
    for record in fit(task_of(parts, head_of(scale=0.1), steps=steps), steps, tmp_path / "killed", Rng(1)):
        if record.step == 7:
            break
    again = task_of(parts, head_of(scale=0.9, seed=5), steps=steps)
    list(fit(again, steps, tmp_path / "killed", Rng(1)))
    for name, value in whole.module.state_dict().items():
        assert again.module.state_dict()[name].equal(value), name
