"""Tiny bases, and corrections that say something."""

from functools import partial

import numpy as np
import pytest
import torch

from freenergy import Rng
from freenergy.testing.networks import tiny_network
from freenergy.training.baselines.local import LocalProbe
from freenergy.training.baselines.residual import Ralm, ResidualLM

V = 5


@pytest.fixture(scope="session")
def network():
    """Makes a base with a network, of any architecture."""
    return partial(tiny_network, vocab_size=V, num_attention_heads=2)


@pytest.fixture(scope="session")
def stream():
    return np.array([1, 2, 3, 0, 1, 4, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0] * 3)


@pytest.fixture(scope="session")
def make_model(network):
    """A ResidualLM of a kind, with weights that are far from 0, or at 0."""

    def make(kind, base=None, at_zero=False):
        base = base or network()
        parts, layers = [], ()
        if kind in ("probe", "both"):
            layers = (1, 2)
            probe = LocalProbe(layers=2, width=base.width, rank=3, vocab_size=base.vocab_size).to(base.model.dtype)
            probe.start(Rng(4))
            parts.append(probe)
        if kind in ("ralm", "both"):
            parts.append(Ralm.from_base(base.model))
        for i, part in enumerate(parts if not at_zero else []):
            with torch.no_grad():
                for j, weight in enumerate(part.parameters()):
                    weight.add_(0.3 * Rng(5).child(i, j).normal(*weight.shape).to(weight))
        for part in parts:
            part.eval()
        return ResidualLM(base, parts, layers=layers)

    return make
