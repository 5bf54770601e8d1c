"""Soft tokens: one-hot rows are the hard tokens, and a frozen energy has the gradient of finite differences."""

from dataclasses import replace

import pytest
import torch

from freenergy import Continuations, Rng, UserError
from freenergy.core.sequences import Soft
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.unit import Unit, UnitEnergy
from freenergy.testing.networks import tiny_network

V = 6
X = Continuations.from_lists([[1, 2, 3], [4], []], [[[5, 1], [3]], [[2, 0], [5, 4]], [[1], [2, 3]]])
READINGS = {
    "bit": lambda base: Bit.from_base(BitEnergy(), base),
    "bit, prefix once": lambda base: Bit.from_base(BitEnergy(prefix_once=True, over="all"), base),
    "unit": lambda base: Unit(UnitEnergy(), base),
}


def frozen(name, architecture="Llama"):
    """A frozen energy in float64, away from its start at E = 0."""
    energy = READINGS[name](tiny_network(architecture, vocab_size=V, sharpness=3.0, dtype=torch.float64))
    with torch.no_grad():
        for weight in energy.readout.parameters():
            weight.copy_(Rng(1).child(str(tuple(weight.shape))).normal(*weight.shape))
    return energy.eval().requires_grad_(False)


def soft(seed=3):
    """Logits at every place, not near any token."""
    return Soft(X.contexts, Rng(seed).normal(*X.tokens.shape, V), X.lengths, "logits")


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "GPTNeoX"])
@pytest.mark.parametrize("name", READINGS)
def test_one_hot_rows_are_the_hard_tokens(name, architecture):
    energy = frozen(name, architecture)
    hard, table = energy(X), energy.trunk.network.get_input_embeddings().weight
    one_hot = Soft.one_hot(X, V, torch.float64)
    assert hard.std() > 1e-3
    torch.testing.assert_close(energy(one_hot), hard, atol=1e-9, rtol=0)
    embeddings = replace(one_hot, values=table[X.tokens], form="embeddings")
    torch.testing.assert_close(energy(embeddings), hard, atol=1e-9, rtol=0)
    torch.testing.assert_close(energy(replace(one_hot, values=1e4 * one_hot.values, form="logits")), hard)


@pytest.mark.parametrize("name", READINGS)
def test_the_gradient_of_a_frozen_energy_is_that_of_finite_differences(name):
    energy, x = frozen(name, "GPT2"), soft()  # which computes everything in float64, where Llama's norms do not
    found = energy(replace(x, values=x.values.clone().requires_grad_()))
    assert found.requires_grad
    values, is_fast = x.values.requires_grad_(), name != "bit"  # the others by random directions
    assert torch.autograd.gradcheck(lambda v: energy(replace(x, values=v)), (values,), fast_mode=is_fast)


def test_every_form_has_a_gradient_and_padding_has_none():
    energy, x = frozen("bit"), soft()
    widths = {"logits": V, "probabilities": V, "embeddings": energy.trunk.width}
    for form, width in widths.items():
        values = Rng(4).normal(*X.tokens.shape, width).requires_grad_()
        energy(replace(x, values=values, form=form)).sum().backward()
        assert (values.grad[X.mask] != 0).any()
        assert (values.grad[~X.mask] == 0).all()


def test_without_gradients_nothing_is_recorded():
    energy, x = frozen("bit"), soft()
    assert not energy(x).requires_grad
    with torch.no_grad():
        assert not energy(replace(x, values=x.values.requires_grad_())).requires_grad


def test_refusals():
    energy = frozen("bit")
    with pytest.raises(UserError, match=r"5 numbers per place, but as probabilities this network reads 6"):
        energy(Soft(X.contexts, torch.zeros(*X.tokens.shape, 5), X.lengths))
