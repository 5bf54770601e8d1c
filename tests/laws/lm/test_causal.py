"""A causal network as E-ARM sees it: what logits depend on, the law of its draws, and the memory."""

import numpy as np
import pytest
import torch

from freenergy import Rng, UserError
from freenergy.lm.networks.blocks import BlockData, Blocks, LaneData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.networks.protocol import Data, Lanes, Network, Recurrent
from freenergy.lm.presets import build, preset
from freenergy.testing.enumerating import law

V = 4


def model(name="tiny", scale=4.0):
    config = preset(name).config(vocab_size=V, eos=0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    for key, value in (sizes | {"n_inner" if name == "tr-base" else "intermediate_size": 32}).items():
        setattr(config, key, value)
    made = build(config, Rng(0))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(scale)
    return made.eval()


def test_roles():
    network = CausalNetwork(model())
    assert isinstance(network, Network)
    assert isinstance(network, Recurrent)
    stream = np.arange(50) % V
    data = BlockData(stream, stream, block=5, batch_size=2, accumulate=1, known=1, validation_tokens=40, rng=Rng(0))
    assert isinstance(data, Data)
    assert not isinstance(data, Lanes)
    assert isinstance(LaneData(stream, stream, block=5, batch_size=2, known=1, validation_tokens=40), Lanes)


@pytest.mark.parametrize("memory", [0, 6])
def test_logits_are_of_each_token_by_those_before_it(memory):
    network = CausalNetwork(model(), memory=memory, rows=2)
    given, tokens = torch.tensor([[1], [2]]), torch.tensor([[3, 0, 2, 1], [0, 1, 1, 3]])
    found = network.logits(given, tokens)
    plain = network.module(torch.cat([given, tokens], dim=1)).logits[:, :-1]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    other = tokens.clone()
    other[:, 2] = 0
    assert torch.equal(network.logits(given, other)[:, :3], found[:, :3])


@pytest.mark.parametrize("memory", [0, 6])
def test_draws_follow_the_network(memory):
    """Two tokens after a known one, every branch of the drawing walked."""
    network = CausalNetwork(model(), memory=memory, rows=1)
    if memory:
        network.logits(torch.tensor([[2]]), torch.tensor([[1, 3, 0]]))
        network.remember()
    given, known = torch.tensor([[0]]), torch.tensor([[1]])
    exact = law(lambda rng: network.draw(given, known, 2, rng)[0][0].tolist(), tuple)
    for (a, b), found in exact.items():
        log_q = network.logits(given, torch.tensor([[1, a, b]])).double().log_softmax(-1)[0]
        assert found == pytest.approx((log_q[1, a] + log_q[2, b]).exp().item(), rel=1e-4)
    assert len(exact) == V * V


def test_drawing_leaves_training_mode_and_gradients_as_they_were():
    network = CausalNetwork(model())
    network.module.train()
    tokens, mask = network.draw(torch.tensor([[1], [2]]), torch.zeros(2, 0, dtype=torch.long), 3, Rng(1))
    assert network.module.training
    assert tokens.shape == mask.shape == (2, 3)
    assert mask.all()
    again, _ = network.draw(torch.tensor([[1], [2]]), torch.zeros(2, 0, dtype=torch.long), 3, Rng(1))
    assert torch.equal(tokens, again)


def test_a_memory_that_holds_everything_reads_as_one_text():
    text = torch.tensor([[1, 3, 0, 2, 2, 1, 3, 3, 0], [2, 0, 0, 1, 3, 2, 1, 0, 2]])
    whole = CausalNetwork(model()).logits(text[:, :1], text[:, 1:])
    network = CausalNetwork(model(), memory=20, rows=2)
    parts = []
    for first in (0, 4):
        block = text[:, first : first + 5]
        parts.append(network.logits(block[:, :1], block[:, 1:]))
        network.remember()
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=0)
    network.forget()
    fresh = network.logits(text[:, 4:5], text[:, 5:])
    assert (fresh - whole[:, 4:]).abs().max() > 1e-3  # without the memory it is another context


def test_a_short_memory_sees_farther_than_it_is_long():
    """What lies behind the memory has shaped it: two texts that differ before it are read differently."""
    seen = []
    for first in (1, 2):
        network = CausalNetwork(model(), memory=3, rows=1)
        for block in ([first, 3, 0, 2], [2, 1, 1, 0], [0, 2, 3, 1]):
            rows = torch.tensor([block])
            found = network.logits(rows[:, :1], rows[:, 1:])
            network.remember()
        seen.append(found)
    assert (seen[0] - seen[1]).abs().max() > 1e-5
    assert network.state["counts"].tolist() == [9, 3]


def test_gradients_stop_at_the_memory():
    network = CausalNetwork(model(), memory=3, rows=1)
    rows = torch.tensor([[1, 3, 0, 2]])
    network.logits(rows[:, :1], rows[:, 1:])
    network.remember()
    assert not any(tensor.requires_grad for tensor in network.state.values())
    network.logits(rows[:, :1], rows[:, 1:]).sum().backward()


def test_validation_reads_apart_and_puts_the_memory_back():
    network = CausalNetwork(model(), memory=3, rows=2)
    rows = torch.tensor([[1, 3, 0, 2], [0, 0, 2, 1]])
    network.logits(rows[:, :1], rows[:, 1:])
    network.remember()
    kept = {name: tensor.clone() for name, tensor in network.state.items()}
    with network.apart():
        found = network.logits(rows[:1, :1], rows[:1, 1:])
        network.remember()
    plain = CausalNetwork(model()).logits(rows[:1, :1], rows[:1, 1:])
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    assert all(torch.equal(network.state[name], tensor) for name, tensor in kept.items())


def test_a_memory_needs_rotary_places():
    with pytest.raises(UserError, match="rotary"):
        CausalNetwork(model("tr-base"), memory=4, rows=1)


def test_lanes_read_on_and_blocks_do_not():
    stream = np.arange(103)
    lanes = LaneData(stream, stream, block=10, batch_size=2, known=0, validation_tokens=60)
    first, second = lanes.batch(1, 0), lanes.batch(2, 0)
    assert first.given.tolist() == [[0], [51]]
    assert second.given.tolist() == [[10], [61]]
    assert torch.equal(second.given, first.tokens[:, -1:])
    assert lanes.epoch_steps == 5
    assert [step for step in range(1, 12) if lanes.is_first(step)] == [1, 6, 11]
    assert torch.equal(torch.cat([each.tokens for each in lanes.held_out()], dim=1)[0], torch.arange(1, 51))


def test_every_block_is_read_once_an_epoch():
    stream = np.arange(101)
    data = BlockData(stream, stream, block=10, batch_size=3, accumulate=1, known=2, validation_tokens=50, rng=Rng(3))
    assert data.epoch_steps == 3
    starts = [data.batch(step, 0).given.flatten().tolist() for step in (1, 2, 3)]
    assert len({start for row in starts for start in row}) == 9
    assert sum(batch.mask.sum() for batch in data.held_out()) == 40
    with pytest.raises(UserError, match="fewer than one block"):
        Blocks(stream[:5], 10, Rng(0), name="training")
