"""The contract of ``Noise``: what it draws has the law that it says.

Pr[draw = x | c] = exp(log_noise(x | c)),      over every random branch, for every string of the space
"""

import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, LanguageModel, Noise
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.testing.comparing import assert_close, everything
from freenergy.testing.enumerating import branches


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
