"""The certificate of writing chunk by chunk, by enumeration of all randomness.

P_n(x) = Π_k P_LM(x_k | c x_<k) · E[exp gain_k]        where one of n draws is kept chunk by chunk
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from freenergy import Rng, certified_gain
from freenergy.core.roles import Target
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.evaluation.written import write_in_chunks
from freenergy.lm.tabular import TabularLM
from freenergy.models.residual import Residual
from freenergy.noise.from_lm import FromLM
from freenergy.samplers.resampling import Resampling
from freenergy.testing import World
from freenergy.testing.enumerating import branches, law

EXACT = 1e-12


@cache
def number_of(context, string):
    return Rng(7).child("c", *context, "x", *string).normal().item()


def energy(x):
    """A number of each context with each string, finished or not."""
    contexts = x.contexts.lists()
    rows = [
        [number_of(tuple(context), tuple(string)) for string in strings]
        for context, strings in zip(contexts, x.lists(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def chunk_gains(windows, row, lm, space, n):
    """Yield the probability and the gain of each way to draw the candidates of a chunk."""
    data, noise = windows.examples(torch.tensor([row])), FromLM(lm, space)
    own = energy(data.x)
    for probability, (_, draws) in branches(lambda rng: noise.draw(None, {}, data, n - 1, rng)):
        yield probability, float(certified_gain(own, energy(draws.x)))


@pytest.mark.parametrize(("eos", "m"), [(None, 2), (0, 2), (0, 1), (0, 3)])
def test_chunks_are_certified_with_a_shorter_last_chunk_and_eos_inside(eos, m):
    n, world = 2, World(tokens=2, length=3, eos=eos)
    lm = TabularLM.random(Rng(4), vocab_size=2, order=2)
    target = Target(Residual(lm, energy), world.context, world.space)
    space = replace(world.space, length=m)
    emitted = law(lambda rng: write_in_chunks(target, m, Resampling(candidates=n), rng), tuple)
    for string in world.names:
        stream = np.array([1, *string, *[0] * 3])
        whole = Windows(stream, places_of(np.array([0]), np.array([len(string)])), 1, 3)
        windows, log_p, bound = whole.in_chunks((m,)), 0.0, 0.0
        for row in range(len(windows)):
            log_base = float(lm.log_prob(windows.continuations([row])))
            gains = list(chunk_gains(windows, row, lm, space, n))
            log_p += log_base + math.log(sum(p * math.exp(gain) for p, gain in gains))
            bound += log_base + sum(p * gain for p, gain in gains)
        assert math.exp(log_p) == pytest.approx(emitted[string], abs=EXACT)
        assert bound <= log_p + EXACT
    assert sum(emitted.values()) == pytest.approx(1.0)
