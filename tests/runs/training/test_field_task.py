"""Fields trained by chains and by noise, against the exact fit of the same model on a world of 30 words."""

import math

import numpy as np
import pytest
import torch

from freenergy import Continuations, NgramLM, Rng, SequenceSpace
from freenergy.core.sequences import Sequences
from freenergy.lm.bigram_table import BigramTable
from freenergy.models.spelling import SpellingModel
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.training.loop import fit
from freenergy.training.maximum_entropy import fit_by_gradient
from freenergy.training.tasks.field import FieldMethod, FieldTask, averaged, unmixed

WORDS = ["ab", "abb", "ba", "aab", "abab", "b", "ab", "abb", "aab", "ab"] * 20


def model(normaliser="global"):
    return SpellingModel.of_words(WORDS, order=2, letters="ab", normaliser=normaliser)


@pytest.fixture(scope="module")
def exact():
    """The log-likelihood of the exact fit, of one constant and of one per length."""
    found = {}
    for normaliser in ("global", "length"):
        fitted = model(normaliser)
        fit_by_gradient(fitted, fitted.encode(WORDS))
        found[normaliser] = fitted.log_prob(fitted.encode(WORDS)).mean().item()
    return found


def noise_of(method, data):
    """A bigram model of the words; a table that learns from nothing for the methods whose noise learns."""
    if method in ("dnce", "jsa"):
        return BigramTable(3, eos=0)
    stream = np.concatenate([np.array(word) for word in data.lists()[0]])
    return NgramLM.fit(stream, vocab_size=3, eos=0, order=2)


def trained(tmp_path, method, *, normaliser="global", steps=150, rate=0.15, kernel=None, noise=None, **more):
    field = model(normaliser)
    data = field.encode(WORDS)
    steps_ = averaged(steps, 100, rate)
    task = FieldTask(
        field, data, noise or noise_of(method, data), FieldMethod(method=method, **more), steps_, field.space,
        kernel=kernel, chains=100, log_lengths=field.log_lengths if normaliser == "length" else None, rng=Rng(3),
    )  # fmt: skip
    list(fit(task, steps_, tmp_path, Rng(1)))
    return field, task, field.log_prob(data).mean().item()


@pytest.mark.parametrize(
    ("method", "normaliser", "more", "close"),
    [
        ("sml", "global", {"moves": 2}, 0.06),
        ("snis", "global", {"noise_ratio": 3}, 0.04),
        ("nce", "length", {"noise_ratio": 3}, 0.1),
        ("dnce", "global", {}, 0.08),
        ("jsa", "global", {"moves": 2}, 0.25),
        ("augsa", "length", {"moves": 2}, 0.06),
    ],
)
def test_methods_come_near_the_exact_likelihood(tmp_path, exact, method, normaliser, more, close):
    """150 steps from zero, where the likelihood is 2 nats lower; with one constant per length ζ is log Z_l too."""
    field, task, found = trained(tmp_path, method, normaliser=normaliser, **more)
    assert exact[normaliser] - close < found <= exact[normaliser] + 1e-9
    if normaliser == "length":
        gap = task.module.zeta.detach() - field.log_partitions().detach()
        assert (gap - gap.mean()).abs().max() < 0.5


def test_contrastive_divergence_ends_elsewhere(tmp_path, exact):
    """One Gibbs move from the data cannot change a length: the lengths are never learned, and it stays below."""
    _, _, found = trained(tmp_path, "cd", kernel=Gibbs())
    assert found < exact["global"] - 0.05


def test_a_killed_training_resumes_with_the_same_bits(tmp_path):
    whole, task, _ = trained(tmp_path / "whole", "sml", steps=20, rate=0.15)

    class StopError(Exception):
        pass

    field = model()
    steps = averaged(20, 100, 0.15)

    def made():
        return FieldTask(
            field, field.encode(WORDS), noise_of("sml", field.encode(WORDS)), FieldMethod(method="sml"), steps,
            field.space, chains=100, rng=Rng(3),
        )  # fmt: skip

    from dataclasses import replace

    hasty = replace(steps, checkpoint_seconds=0.0)
    try:
        for record in fit(made(), hasty, tmp_path / "killed", Rng(1)):
            if record.step == 9:
                raise StopError
    except StopError:
        pass
    resumed = made()
    list(fit(resumed, hasty, tmp_path / "killed", Rng(1)))
    assert field.weights.equal(whole.weights)
    assert resumed.state["tokens"].equal(task.state["tokens"])


def test_the_fixed_noise_optimum_of_dnce_is_the_mixture_and_can_be_undone():
    """Table of four: ora (.5 .3 .15 .05), q (.1 .2 .3 .4), α = ½: the slope is 0 at (.3 .25 .225 .225), not at ora."""
    ora, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    mixed = 0.5 * ora + 0.5 * q
    assert mixed.tolist() == pytest.approx([0.3, 0.25, 0.225, 0.225])

    def slope(at):
        score = at.log().requires_grad_()
        logit = score - q.log()
        loss = -(mixed * torch.nn.functional.logsigmoid(logit)).sum()
        loss = loss - (q * torch.nn.functional.logsigmoid(-logit)).sum()
        return torch.autograd.grad(loss, score)[0].abs().max().item()

    assert slope(mixed) < 1e-15
    assert slope(ora) > 0.02
    assert unmixed(mixed.log() - q.log(), 0.5).exp().mul(q).tolist() == pytest.approx(ora.tolist(), abs=1e-12)


def test_the_table_is_a_language_model():
    """Probabilities over the space sum to one, and draws have the law (chi-square, false failure 1e-6)."""
    from scipy.stats import chisquare

    table = BigramTable(3, eos=0)
    with torch.no_grad():
        table.logits.copy_(torch.tensor([[0.1, 1.0, -0.5], [0.3, -0.2, 0.8], [0.0, 0.4, 0.2]]))
    space = SequenceSpace(vocab_size=3, length=3, eos=0)
    every = space.enumerate()
    x = Continuations(Sequences.from_lists([[]]), every.tokens.unsqueeze(0), every.lengths.unsqueeze(0))
    p = table.log_prob(x).exp()[0].detach()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    drawn = table.sample(Sequences.from_lists([[]]), 4000, space, Rng(2))
    index = {tuple(row): i for i, row in enumerate(x.lists()[0])}
    seen = torch.bincount(torch.tensor([index[tuple(row)] for row in drawn.x.lists()[0]]), minlength=len(p))
    assert chisquare(seen, p.numpy() * 4000).pvalue > 1e-6
    assert math.isclose(drawn.log_base[0, 0].item(), p[index[tuple(drawn.x.lists()[0][0])]].log().item(), abs_tol=1e-12)
