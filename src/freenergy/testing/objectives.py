"""The contract of ``Objective``: what its population loss is minimised by.

    ∇ E[objective] = 0 at log_score = log P_data,      the expectation over a datum and K draws of the noise

The expectation is a sum over every datum and every tuple of draws, so the check has no statistics.
"""

from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.roles import Objective, Scores


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
