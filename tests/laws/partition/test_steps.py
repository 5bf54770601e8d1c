"""Per-step probabilities: they multiply to the sequence's and sum to one; the last position against the whole sum."""

import math
from dataclasses import replace

import pytest
import torch

from freenergy import (
    Continuations,
    Residual,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Target,
    UserError,
)
from freenergy.partition import distinct, exact_log_partition, log_partition, log_weights, step_log_probs, stratified
from freenergy.partition.exact import after, completed

V, L = 3, 3
BASE = TabularLM.random(Rng(1), vocab_size=V, order=1)
each_space = pytest.mark.parametrize(
    "space", [SequenceSpace(vocab_size=V, length=L, eos=eos) for eos in (0, None)], ids=["ended", "fixed"]
)


class Bigrams:
    """E = Σ of one number a pair of neighbours, the context's last token included: every token changes what follows."""

    def __init__(self, vocab_size, spread, seed=3):
        self.values = (spread * Rng(seed).normal(vocab_size, vocab_size)).double()

    def __call__(self, x: Continuations) -> torch.Tensor:
        last = x.contexts.tokens.gather(1, (x.contexts.lengths - 1).clamp(min=0).unsqueeze(1))
        before = torch.cat([last.unsqueeze(1).expand(-1, x.shape[1], 1), x.tokens[:, :, :-1]], dim=2)
        return (self.values[before, x.tokens] * x.mask).sum(2) + 0.3 * (x.lengths > 1)


ENERGY = Bigrams(V, 1.0)
MODEL = Residual(BASE, ENERGY)


def every_string(space):
    """Each string of the space as the one continuation of a context of its own."""
    strings = space.enumerate()
    contexts = Sequences.from_lists([[2]] * len(strings))
    return Continuations(contexts, strings.tokens.unsqueeze(1), strings.lengths.unsqueeze(1))


@each_space
def test_exact_steps_multiply_and_sum_to_one(space):
    x = every_string(space)
    steps = step_log_probs(MODEL, x, space, Rng(0), draws=None)
    log_z = exact_log_partition(Target(MODEL, x.contexts[:1], space))
    log_p = (BASE.log_prob(x) - ENERGY(x))[:, 0] - log_z
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(steps.estimate.sum(1), log_p, atol=1e-12, rtol=0)
    assert torch.equal(steps.lower, steps.upper)
    after = {}
    for string, row in zip(x.lists(), steps.estimate.exp().tolist(), strict=True):
        for t, token in enumerate(string[0]):
            after.setdefault(tuple(string[0][:t]), {})[token] = row[t]
    assert len(after) == (7 if space.eos == 0 else 13)
    for head, probs in after.items():
        assert len(probs) == V
        assert sum(probs.values()) == pytest.approx(1, abs=1e-12), head
    # mutant: the base's own steps multiply to something else
    assert (steps.log_base.sum(1) - log_p).abs().max() > 0.1


@each_space
def test_drawn_steps_add_up_whatever_the_draws(space):
    x = every_string(space)
    steps = step_log_probs(MODEL, x, space, Rng(5), draws=4)
    head = stratified(BASE, x.contexts, 4, space, Rng(5).child("step", 0))
    log_z = log_partition(log_weights(ENERGY, head)).lower
    wanted = (BASE.log_prob(x) - ENERGY(x))[:, 0] - log_z
    torch.testing.assert_close(steps.estimate.sum(1), wanted, atol=1e-12, rtol=0)
    assert (steps.lower <= steps.estimate + 1e-12).all()
    assert (steps.estimate <= steps.upper + 1e-12).all()
    assert (steps.upper - steps.lower > 1e-6).any()
    assert (steps.estimate[~steps.mask] == 0).all()
    assert torch.equal(steps.mask, x.mask[:, 0])


def test_the_bounds_of_a_step_take_opposite_estimates():
    """lower = log P_LM + lower(t + 1) − upper(t), upper the other way round (Eq. 5), from the same draws."""
    space = SequenceSpace(vocab_size=V, length=L)
    x = every_string(space)
    steps = step_log_probs(MODEL, x, space, Rng(5), draws=4, exact_last=False)
    bounds = {"lower": [], "upper": []}
    for t, draw in enumerate((stratified, stratified, distinct)):
        heads, left = x.tokens[:, 0, :t], replace(space, length=L - t)
        drawn = draw(BASE, after(x.contexts, heads, BASE.eos), 4, left, Rng(5).child("step", t))
        found = log_partition(log_weights(ENERGY, replace(drawn, x=completed(x.contexts, heads, drawn.x))))
        for name, values in bounds.items():
            values.append(getattr(found, name))
    for values in bounds.values():
        values.append(-ENERGY(x)[:, 0])
    lower, upper = (torch.stack(bounds[name], dim=1) for name in ("lower", "upper"))
    torch.testing.assert_close(steps.lower, steps.log_base + lower[:, 1:] - upper[:, :-1], atol=1e-12, rtol=0)
    torch.testing.assert_close(steps.upper, steps.log_base + upper[:, 1:] - lower[:, :-1], atol=1e-12, rtol=0)
    # mutants: one estimate above and below gives the estimate, at every place that draws
    assert ((steps.estimate - steps.lower)[:, :2] > 1e-3).any(0).all()
    assert ((steps.upper - steps.estimate)[:, :2] > 1e-3).any(0).all()


@each_space
def test_the_last_step_is_summed_unless_it_is_asked_not_to_be(space):
    x = every_string(space)
    is_last = x.mask[:, 0, -1]
    exact = step_log_probs(MODEL, x, space, Rng(5), draws=None).estimate[is_last, -1]
    for draws, is_summed in ((2, True), (2, False), (V, False)):
        found = step_log_probs(MODEL, x, space, Rng(5), draws=draws, exact_last=is_summed)
        is_exact = (found.estimate[is_last, -1] - exact).abs().max() < 1e-12
        assert is_exact == (is_summed or draws == V)  # as many distinct draws as tokens are all of them


def test_every_text_has_draws_of_its_own():
    """A text's steps are the same alone and beside others that end earlier."""
    space = SequenceSpace(vocab_size=V, length=L, eos=0)
    x = Continuations.from_lists([[1], [2], [1], [2]], [[[0]], [[1, 2, 1]], [[2, 0]], [[2, 1, 1]]])
    together = step_log_probs(MODEL, x, space, Rng(5), draws=4, exact_last=False)
    for b in range(4):
        alone = step_log_probs(MODEL, x[b : b + 1], space, Rng(5).shift(contexts=b), draws=4, exact_last=False)
        for name in ("estimate", "lower", "upper"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[b], atol=1e-12, rtol=0)


@each_space
def test_given_draws_are_used_at_the_start(space):
    x = every_string(space)
    given = Rng(6).normal(len(x.tokens), 9)
    steps = step_log_probs(MODEL, x, space, Rng(5), draws=4, at_start=given)
    wanted = (BASE.log_prob(x) - ENERGY(x))[:, 0] - log_partition(given).lower
    torch.testing.assert_close(steps.estimate.sum(1), wanted, atol=1e-12, rtol=0)


@each_space
def test_many_draws_come_to_the_exact_steps(space):
    x = every_string(space)[:6]
    exact = step_log_probs(MODEL, x, space, Rng(5), draws=None)
    found = step_log_probs(MODEL, x, space, Rng(5), draws=3000, exact_last=False)
    few = step_log_probs(MODEL, x, space, Rng(5), draws=3, exact_last=False)
    assert (found.estimate - exact.estimate).abs().max() < 0.1 < (few.estimate - exact.estimate).abs().max()


def test_bad_requests_are_refused():
    space = SequenceSpace(vocab_size=V, length=L, eos=0)
    x = every_string(space)
    with pytest.raises(UserError, match="at least two draws"):
        step_log_probs(MODEL, x, space, Rng(0), draws=1)
    two = Continuations.from_lists([[1]], [[[0], [1, 0]]])
    with pytest.raises(UserError, match="2 continuations per context"):
        step_log_probs(MODEL, two, space, Rng(0), draws=2)
    unfinished = Continuations.from_lists([[1]], [[[1, 2]]])
    with pytest.raises(UserError, match="not in a space"):
        step_log_probs(MODEL, unfinished, space, Rng(0), draws=2)


@pytest.fixture(scope="module")
def stories(story_model):
    """A trained model of 260 thousand weights and 512 tokens, and text that it wrote."""
    lm, _ = story_model
    contexts = lm.sample(Sequences.from_lists([[1]] * 3), 1, SequenceSpace(vocab_size=512, length=12), Rng(8)).x
    return lm, Sequences(contexts.tokens[:, 0], contexts.lengths[:, 0])


def test_the_last_position_of_a_real_model(stories):
    """Within 1e-3 nats of the sum over the vocabulary, which has 512 tokens; 1024 independent draws are not."""
    lm, contexts = stories
    space, energy = SequenceSpace(vocab_size=512, length=2), Bigrams(512, 0.7)
    x = lm.sample(contexts, 1, space, Rng(9)).x
    exact = step_log_probs(Residual(lm, energy), x, space, Rng(1), draws=2).estimate[:, -1]
    for draws in (256, 1024):  # fewer than there are tokens, and more
        found = step_log_probs(Residual(lm, energy), x, space, Rng(1), draws=draws, exact_last=False)
        assert (found.estimate[:, -1] - exact).abs().max() < 1e-3
    assert (exact - found.log_base[:, -1]).abs().max() > 0.05  # there is something to agree on
    last, heads = SequenceSpace(vocab_size=512, length=1), x.tokens[:, 0, :1]
    free = lm.sample(after(contexts, heads, lm.eos), 1024, last, Rng(2)).x
    log_z = (-energy(completed(contexts, heads, free))).logsumexp(1) - math.log(1024)
    mutant = found.log_base[:, -1] - energy(x)[:, 0] - log_z
    assert (mutant - exact).abs().max() > 1e-3
