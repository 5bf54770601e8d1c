"""The energy in a language model's own logits: Eq. 4 of E-ARM, on real networks and by enumeration."""

import pytest
import tokenizers
import torch

from freenergy import Continuations, HuggingFaceLM, ResidualModel, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.core.roles import Target
from freenergy.corpus import Tokenizer
from freenergy.energies.logits import Logits, LogitsEnergy
from freenergy.energies.registry import load_energy
from freenergy.lm.presets import build, preset
from freenergy.models.residual import Residual
from freenergy.partition import exact_log_partition
from freenergy.testing import check_energy

V = 5
X = Continuations.from_lists(
    [[1, 2, 3, 4], [2], [], [3, 0, 1]],
    [[[4, 1, 2], [3], []], [[4, 2, 0], [1, 2, 3], [4]], [[1], [2, 3], [4, 0]], [[], [1], [4, 3, 2]]],
)


def base(family="tiny"):
    config = preset(family).config(vocab_size=V, eos=0)
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size = 2, 16, 2, 32
    model = build(config, Rng(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return HuggingFaceLM(model, eos=0)


def slow(lm, context, x):
    """−log Σ_v e^{f(v; c, x_<K)}, by a stock forward pass; an empty context reads as EOS."""
    read = torch.tensor([[*(context or [0]), *x[:-1]]])
    return -lm.model(read).logits[0, -1].double().logsumexp(-1).item() if x else 0.0


def test_it_is_the_level_of_the_last_logits():
    lm = base()
    E = Logits(LogitsEnergy(), lm)(X)
    contexts = X.contexts.lists()
    for b, n in ((b, n) for b in range(4) for n in range(3)):
        x = X.tokens[b, n, : X.lengths[b, n]].tolist()
        assert E[b, n].item() == pytest.approx(slow(lm, contexts[b], x), abs=1e-5)
    assert E.std() > 0.01


def test_it_keeps_the_contract_of_an_energy():
    check_energy(Logits(LogitsEnergy(), base()), X)


def test_the_joint_model_is_that_of_equation_4():
    """P ∝ q(x_<K)·e^{f(x_K; x_<K)} over all strings of three tokens."""
    lm, c, L = base(), [1, 3], 3
    joint = ResidualModel(base=lm, energy=Logits(LogitsEnergy(), lm))
    strings = [[i, j, k] for i in range(V) for j in range(V) for k in range(V)]
    x = Continuations.from_lists([c], [strings])
    log_p = joint.log_score(x)[0].double()
    exact = []
    for s in strings:
        logits = lm.model(torch.tensor([c + s[:-1]])).logits[0, -L:].double()
        log_q = logits.log_softmax(-1)
        exact.append(log_q[0, s[0]] + log_q[1, s[1]] + logits[2, s[2]])
    torch.testing.assert_close(log_p, torch.stack(exact), atol=2e-5, rtol=0)
    space = SequenceSpace(vocab_size=V, length=L)
    log_z = exact_log_partition(Target(Residual(lm, joint.energy), Sequences.from_lists([c]), space))
    torch.testing.assert_close(log_z.double().flatten(), torch.stack(exact).logsumexp(0).view(1), atol=2e-5, rtol=0)


def test_saved_and_opened_again(tmp_path):
    lm = base()
    energy = Logits(LogitsEnergy(), lm)
    energy.save_pretrained(tmp_path / "energy")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    again = load_energy(tmp_path / "energy", base=lm, tokenizer=Tokenizer(words, eos=0))
    assert torch.equal(energy(X), again(X))
    assert not list(energy.parameters())


def test_a_base_without_a_network_is_refused():
    with pytest.raises(UserError, match="no network"):
        Logits(LogitsEnergy(), TabularLM(torch.zeros(1, 4), eos=0))
