"""The small recurrent network: what its logits depend on, and the law of its draws by walking every branch."""

import itertools

import pytest
import torch

from freenergy import Rng
from freenergy.lm.networks.gru import GRUNetwork
from freenergy.lm.networks.protocol import Network, Recurrent
from freenergy.testing.enumerating import law

V = 3


@pytest.fixture(scope="module")
def network():
    made = GRUNetwork(V, width=5, dropout=0.5, rng=Rng(1))
    with torch.no_grad():
        for weight in made.module.parameters():
            weight.mul_(3)
    made.module.double().eval()
    return made


def test_roles(network):
    assert isinstance(network, Network)
    assert not isinstance(network, Recurrent)  # nothing is carried from one step of training to the next


def test_probabilities_sum_to_one_over_all_strings(network):
    strings = torch.tensor(list(itertools.product(range(V), repeat=3)))
    log_q = network.logits(None, strings).log_softmax(-1).gather(-1, strings.unsqueeze(-1)).sum((1, 2))
    assert log_q.exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_a_logit_sees_the_tokens_before_it_and_no_other(network):
    tokens = torch.tensor([[0, 2, 1, 1]])
    found = network.logits(None, tokens)
    for t in range(4):
        other = tokens.clone()
        other[0, t] = (other[0, t] + 1) % V
        changed = (network.logits(None, other) - found).abs().amax(-1)[0] > 1e-9
        assert changed.tolist() == [k > t for k in range(4)]


@pytest.mark.parametrize("known", [[], [2]])
def test_draws_follow_the_network(network, known):
    start = torch.tensor([known], dtype=torch.long)
    exact = law(lambda rng: network.draw(None, start, 2, rng)[0][0].tolist(), tuple)
    assert len(exact) == V * V
    for drawn, found in exact.items():
        tokens = torch.tensor([[*known, *drawn]])
        log_q = network.logits(None, tokens).log_softmax(-1).gather(-1, tokens.unsqueeze(-1))[0, len(known) :]
        assert found == pytest.approx(log_q.sum().exp().item(), abs=1e-12)


def test_drawing_is_without_dropout_and_leaves_training_mode(network):
    network.module.train()
    try:
        empty = torch.zeros(50, 0, dtype=torch.long)
        tokens, mask = network.draw(None, empty, 4, Rng(2))
        again, _ = network.draw(None, empty, 4, Rng(2))
        assert network.module.training
        assert torch.equal(tokens, again)
        assert mask.all()
    finally:
        network.module.eval()
