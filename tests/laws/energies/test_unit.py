"""The causal energy: begins as the base, reads the prefix once, and gives what a plain reading gives."""

import copy
from functools import partial

import pytest
import tokenizers
import torch

from freenergy import Continuations, Rng, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.unit import Unit, UnitEnergy
from freenergy.lm import shared_prefix
from freenergy.testing import check_energy
from freenergy.testing.networks import ARCHITECTURES, tiny_network

V = 11
TOKENIZER = Tokenizer(
    tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1")), eos=0
)
X = Continuations.from_lists(
    [[1, 2, 3, 4, 5], [6], [], [7, 0, 8]],
    [[[9, 1, 2], [3], []], [[4, 5, 0], [6, 7, 8], [9]], [[1], [2, 3], [4, 0]], [[], [10], [10, 9, 8]]],
)
base = partial(tiny_network, vocab_size=V)


def moved(energy, scale=0.3):
    """Away from the start, where every energy is 0 and nothing can be told apart."""
    with torch.no_grad():
        for weight in energy.readout.parameters():
            weight.copy_(scale * Rng(1).child(str(tuple(weight.shape))).normal(*weight.shape))
    return energy.eval()


@torch.no_grad()
def plainly(energy, context, x):
    """One string through a stock forward pass, as anyone would write it."""
    context = context or [0]
    states = energy.trunk.network(torch.tensor([context + x])).last_hidden_state[0]
    own = states if energy.settings.over == "all" else states[len(context) :]
    pooled = own.sum(0) / (max(len(own), 1) if energy.settings.pool == "mean" else 1)
    return float(energy.readout.weight[0] @ pooled + energy.readout.bias[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_starts_at_exactly_zero_and_keeps_the_contract(name):
    energy = Unit(UnitEnergy(), base(name))
    assert torch.equal(energy(X), torch.zeros(4, 3))
    check_energy(moved(energy), X)
    assert energy(X).std() > 1e-3
    assert energy.trunk.shares_prefix == (name != "Mamba")


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("over", ["continuation", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharing_the_prefix_equals_a_plain_reading(name, pool, over):
    energy = moved(Unit(UnitEnergy(pool=pool, over=over), base(name, torch.float64)))
    found = energy(X).detach()
    for b, context in enumerate(X.contexts.lists()):
        for n, x in enumerate(X.lists()[b]):
            assert abs(float(found[b, n]) - plainly(energy, context, x)) < 1e-9


def test_an_empty_continuation_has_the_bias_alone():
    energy = moved(Unit(UnitEnergy(), base()))
    assert energy(X)[0, 2].item() == energy.readout.bias.item()
    none = Continuations.from_lists([[1, 2]], [[[], []]])
    assert torch.equal(energy(none), energy.readout.bias.expand(1, 2))


def test_the_base_is_copied_and_stays_as_it_was():
    lm = base()
    before = copy.deepcopy(lm.model.state_dict())
    energy = moved(Unit(UnitEnergy(), lm)).train()
    assert all(weight.requires_grad for weight in energy.parameters())
    optimiser = torch.optim.SGD(energy.parameters(), lr=0.1)
    at_start = energy(X).detach()
    energy(X).square().sum().backward()
    optimiser.step()
    assert not torch.equal(energy(X), at_start)
    assert all(torch.equal(weight, before[name]) for name, weight in lm.model.state_dict().items())
    assert not any(weight.requires_grad for weight in lm.model.parameters())


def directional_error(energy, x):
    """|finite difference − gradient| along a random direction in all parameters, relative to the gradient's part."""
    weights = [weight for weight in energy.parameters() if weight.requires_grad]
    ways = [Rng(2).child(i).normal(*weight.shape) for i, weight in enumerate(weights)]
    energy(x).square().sum().backward()
    wanted = sum(float((weight.grad * way).sum()) for weight, way in zip(weights, ways, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.add_(step * way)
            values.append(float(energy(x).square().sum()))
    return abs((values[0] - values[1]) / 2e-6 - wanted) / abs(wanted)


@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX"])  # the norms of others round to float32
def test_gradients_against_finite_differences(name):
    lm = base(name, torch.float64)
    assert directional_error(moved(Unit(UnitEnergy(over="all"), lm)), X) < 1e-5


def test_save_and_load_give_equal_bits(tmp_path):
    lm = base()
    energy = moved(Unit(UnitEnergy(pool="sum", over="all", dropout=0.1), lm))
    with torch.no_grad():
        for weight in energy.trunk.parameters():
            weight.mul_(1.1)
    energy.save_pretrained(tmp_path / "unit")
    again = Unit.from_pretrained(tmp_path / "unit", base=lm, tokenizer=TOKENIZER).eval()
    assert again.settings == energy.settings
    assert torch.equal(again(X), energy(X))
    assert {path.suffix for path in (tmp_path / "unit").rglob("*") if path.is_file()} == {".json", ".safetensors"}
    weights = tmp_path / "unit" / "energy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="does not hold the weights of this energy"):
        Unit.from_pretrained(tmp_path / "unit", base=lm, tokenizer=TOKENIZER)


def test_a_base_without_a_network_is_one_sentence():
    with pytest.raises(UserError, match="a TabularLM has no network: take a base with one"):
        Unit(UnitEnergy(), TabularLM.random(Rng(0), vocab_size=V, order=1))


def test_too_long_a_prefix_is_one_sentence():
    with pytest.raises(UserError, match="shorten the prefix to 21 tokens"):
        Unit(UnitEnergy(), base("GPT2"))(Continuations.from_lists([[1] * 22], [[[1, 2, 3]]]))


def test_dropout_is_at_work_in_training_only():
    energy = moved(Unit(UnitEnergy(dropout=0.3), base("GPT2")))
    assert torch.equal(energy(X), energy(X))
    energy.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(energy(X), energy(X))


@pytest.mark.statistical
@pytest.mark.parametrize("fault", [None, "not rescaled"])
def test_dropout_on_the_weights_leaves_the_mean(fault, monkeypatch):
    """Attention is linear in its weights, so over many draws the mean is attention without dropout.

    Both parts, 4000 draws; the largest of 32 z-scores stays below 6 but for a false-failure rate of 32·2e-9 = 6e-8.
    """
    drop = torch.nn.functional.dropout
    if fault:
        monkeypatch.setattr(torch.nn.functional, "dropout", lambda w, p: drop(w, p) * (1 - p / 10))
    draw = [Rng(3).child(i).normal(1, 2, 4, 4).float().expand(4000, 2, 4, 4) for i in range(5)]
    prefix = shared_prefix.Prefix([draw[0]], [draw[1]], torch.full((4000,), 3))
    model = base().model

    def attend(dropout):
        with shared_prefix.attending_to(prefix, model):
            return shared_prefix._attention(model, *draw[2:], None, dropout=dropout)[0].flatten(1)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        outs = attend(0.4)
    z = (outs.mean(0) - attend(0.0)[0]) / (outs.std(0) / 4000**0.5)
    assert len(z) == 32
    assert (z.abs().max().item() > 6) == bool(fault)
