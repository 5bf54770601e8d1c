"""The contracts of ``Objective`` and ``Noise``: what minimises the population loss, and the law of what is drawn.

    ∇ E[objective] = 0 at log_score = log P_data,      the expectation over a datum and K draws of the noise
    Pr[draw = x | c] = exp(log_noise(x | c)),          over every random branch, for every string of the space

The expectation is a sum over every datum and every tuple of draws, so the check has no statistics.
"""

from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, LanguageModel, Noise, Objective, Scores
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.testing.enumerating import assert_close, branches, everything


def check_objective(
    objective: Objective,
    log_data: Float[Tensor, " S"],
    log_noise: Float[Tensor, " S"],
    *,
    num: int = 2,
    tolerance: float = 1e-12,
) -> None:
    """Checks every law of ``Objective`` on a space of S strings with the given laws of data and noise, float64.

    The expected gradient is zero at log_score = log P_data and not elsewhere; gradients equal finite differences; the
    value depends on log_score − log_noise alone.
    """
    assert isinstance(objective, Objective), f"{type(objective).__name__} does not play the role of an objective"
    at_truth = expected_gradient(objective, log_data, log_data, log_noise, num).abs().max().item()
    assert at_truth <= tolerance, f"the expected gradient at the truth is {at_truth:.2e}, not zero"
    elsewhere = expected_gradient(objective, 2 * log_noise - log_data, log_data, log_noise, num).abs().max().item()
    assert elsewhere > 1e-3, f"the expected gradient is zero away from the truth too ({elsewhere:.2e})"
    _check_gradients(objective, log_data, log_noise, num)


def expected_gradient(
    objective: Objective,
    log_score: Float[Tensor, " S"],
    log_data: Float[Tensor, " S"],
    log_noise: Float[Tensor, " S"],
    num: int,
) -> Float[Tensor, " S"]:
    """Returns the gradient of E[objective] in the score of each string.

    One batch holds all S^(1 + K) rows. The objective is a mean over rows, so R times the gradient of a row is what that
    row would have alone, and the expectation weighs each row by its probability.
    """
    S = len(log_score)
    rows = torch.tensor(list(product(range(S), repeat=1 + num)))
    weight = (log_data[rows[:, 0]] + log_noise[rows[:, 1:]].sum(1)).exp().unsqueeze(1) * len(rows)
    s = log_score[rows].requires_grad_()
    data, negatives = Scores(s[:, :1], log_noise[rows[:, :1]]), Scores(s[:, 1:], log_noise[rows[:, 1:]])
    (gradient,) = torch.autograd.grad(objective(data, negatives).value, s)
    return torch.zeros_like(log_score).index_add_(0, rows.flatten(), (weight * gradient).flatten())


def _check_gradients(objective: Objective, log_data: Tensor, log_noise: Tensor, num: int) -> None:
    """Autograd = finite differences at scores that nobody has fitted; equal shifts of score and noise cancel."""
    rows = (torch.arange(4).unsqueeze(1) * 3 + torch.arange(1 + num)) % len(log_data)
    s, noise = log_data.flip(0)[rows] / 2, log_noise[rows]

    def value(score: Tensor, law: Tensor) -> Tensor:
        return objective(Scores(score[:, :1], law[:, :1]), Scores(score[:, 1:], law[:, 1:])).value

    assert torch.autograd.gradcheck(lambda score: value(score, noise), (s.clone().requires_grad_(),))
    shift = torch.linspace(-3, 3, s.numel(), dtype=s.dtype).view_as(s)
    gap = (value(s + shift, noise + shift) - value(s, noise)).abs().item()
    assert gap <= 1e-10, f"the value changes by {gap:.2e} with a shift that log_score and log_noise share"


def draws_of(noise: Noise, rows: Int[Tensor, " batch"], x: Continuations, num: int, rng: Rng) -> Draws:
    """Returns ``num`` draws for each window from the noise as it starts."""
    return noise.draw(None, noise.init(rng), Examples(x, rows), num, rng)[1]


def check_noise(
    noise: Noise,
    base: LanguageModel,
    data: Examples,
    space: SequenceSpace,
    *,
    num: int = 1,
    tolerance: float = 1e-9,
    is_enumerable: bool = True,
) -> None:
    """Checks every law of ``Noise`` on the windows ``data``, each with ``num`` draws.

    ``is_enumerable=False`` leaves out the law of the draws, for noise that was drawn before.
    """
    assert isinstance(noise, Noise), f"{type(noise).__name__} does not play the role of a noise"
    draws = draws_of(noise, data.rows, data.x, num, Rng(3))
    assert draws.x.shape == (len(data.rows), num), f"asked for {num} draws of each window, got {draws.x.shape}"
    assert_close(draws.log_base, base.log_prob(draws.x), tolerance, "log_base of draws is the base's")
    again = draws_of(noise, data.rows, data.x, num, Rng(3))
    assert torch.equal(draws.x.tokens, again.x.tokens), "the same seed gave other draws"
    log_noise = noise.log_noise(draws.x)
    if log_noise is not None and num == 1:
        assert_close(draws.log_proposal, log_noise.detach(), tolerance, "log_proposal of draws is log_noise")
    for b in range(len(data.rows)):
        one = Examples(data.x[b : b + 1], data.rows[b : b + 1])
        alone = draws_of(noise, one.rows, one.x, num, Rng(3))
        assert alone.x.lists()[0] == draws.x.lists()[b], f"the draws of window {b} depend on the batch around it"
        if is_enumerable:
            _check_law(noise, one, space, num, tolerance)


def _check_law(noise: Noise, data: Examples, space: SequenceSpace, num: int, tolerance: float) -> None:
    """The law of one of the ``num`` draws, chosen uniformly, is exp(log_noise)."""
    every = everything(data.x.contexts.lists(), space)
    names = [tuple(x) for x in every.lists()[0]]
    found = dict.fromkeys(names, 0.0)
    for probability, draws in branches(lambda rng: draws_of(noise, data.rows, data.x, num, rng)):
        for x in map(tuple, draws.x.lists()[0]):
            assert x in found, f"the noise drew {x}, which is not in {space}"
            found[x] += probability / num
    law = torch.tensor([found[name] for name in names], dtype=torch.float64)
    assert_close(law.sum(), torch.tensor(1.0), tolerance, "the probabilities of all draws sum to one")
    log_noise = noise.log_noise(every)
    if log_noise is not None:
        assert_close(law, log_noise.detach()[0].exp(), tolerance, "the law of the draws is log_noise")
