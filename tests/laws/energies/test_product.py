"""A product of experts is the sum of their energies."""

import numpy as np
import pytest
import tokenizers
import torch

from freenergy import Continuations, Rng, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.ngram_features import NgramEnergy, NgramFeatures
from freenergy.energies.ngram_tables import NgramTables
from freenergy.energies.product import Product
from freenergy.testing import check_energy

V = 5
X = Continuations.from_lists([[1, 2], []], [[[1, 2, 3], [4], [3, 3]], [[2, 0], [1], [4, 4, 4]]])


def expert(seed):
    stream = np.append(np.random.default_rng(seed).integers(0, V, 80), 0)
    energy = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=V, eos=0, order=2))
    with torch.no_grad():
        energy.fit_scale([energy.features(X)])
        energy.weight.copy_(Rng(seed).normal(len(energy.names)))
    return energy


class Dropping(torch.nn.Module):
    """An expert in float32 with dropout."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(V, 1)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return (self.dropout(self.table(x.tokens)).squeeze(-1) * x.mask).sum(-1)


def test_energies_add_up():
    one, two = expert(1), expert(2)
    product = Product([one, two], (1.0, -0.5), names=("counts", "others"))
    torch.testing.assert_close(product(X), one(X) - 0.5 * two(X), atol=1e-12, rtol=0)
    assert list(product.energies(X)) == ["0 counts", "1 others"]
    assert product(X).dtype == torch.float64
    check_energy(product, X, tolerance=1e-10)
    nested = Product([product, one])
    torch.testing.assert_close(nested(X), 2 * one(X) - 0.5 * two(X), atol=1e-12, rtol=0)


def test_frozen_parts_neither_learn_nor_drop():
    frozen, free = Dropping(), Dropping()
    product = Product([frozen, free], frozen=(True, False)).train()
    assert not frozen.dropout.training
    assert free.dropout.training
    assert [weight is free.table.weight for weight in product.parameters() if weight.requires_grad] == [True]
    product(X).sum().backward()
    assert frozen.table.weight.grad is None
    assert free.table.weight.grad.abs().sum() > 0
    product.eval()
    assert product(X).dtype == torch.float64


def test_saved_and_loaded_it_has_the_same_bits(tmp_path):
    product = Product(
        [Product([expert(1), expert(2)], (0.5, 2.0)), expert(3)], frozen=(True, False), names=("old", "new")
    )
    product.save_pretrained(tmp_path / "energy")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    base = TabularLM.random(Rng(0), vocab_size=V, order=1)
    again = Product.from_pretrained(tmp_path / "energy", base=base, tokenizer=Tokenizer(inner, 0))
    assert torch.equal(again(X), product(X))
    assert (again.names, again.frozen, again.scales) == (product.names, product.frozen, product.scales)
    assert not again.parts[0].parts[0].weight.requires_grad
    assert again.parts[1].weight.requires_grad
    with pytest.raises(UserError, match="of kind 'product', not 'ngram'"):
        NgramFeatures.from_pretrained(tmp_path / "energy", base=base, tokenizer=Tokenizer(inner, 0))


def test_what_cannot_be_is_said():
    with pytest.raises(UserError, match="at least one energy"):
        Product([])
    with pytest.raises(UserError, match="2 scales"):
        Product([expert(1)], (1.0, 2.0))
