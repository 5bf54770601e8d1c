"""The log-ratio energy: α·(log P_LM − log Q) + a pooled scalar of Q's states."""

import pytest
import tokenizers
import torch
import transformers

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.energies.log_ratio import LogRatio, LogRatioEnergy, log_prob
from freenergy.testing import check_energy
from freenergy.testing.networks import tiny_network

V = 11
X = Continuations.from_lists(
    [[1, 2, 3, 4, 5], [6], [], [7, 0, 8]],
    [[[9, 1, 2], [3], []], [[4, 5, 0], [6, 7, 8], [9]], [[1], [2, 3], [4, 0]], [[], [10], [10, 9, 8]]],
)
ARCHITECTURES = ["GPT2", "Llama", "GPTNeoX", "Mamba"]


def base(name="GPTNeoX", dtype=torch.float32, **options):
    """With and without a head that is tied to the embeddings."""
    return tiny_network(name, dtype, vocab_size=V, tie_word_embeddings=name != "Llama", **options)


def moved(energy, scale=0.02):
    """Q away from the base, and the readout away from 0."""
    with torch.no_grad():
        for i, weight in enumerate(energy.parameters()):
            weight.add_(scale * Rng(1).child(i).normal(*weight.shape))
    return energy.eval()


def whole_q(energy, lm):
    """Q as an ordinary causal language model."""
    model = transformers.AutoModelForCausalLM.from_config(lm.model.config)
    model.base_model.load_state_dict(energy.trunk.network.state_dict())
    model.get_output_embeddings().load_state_dict(energy.head.state_dict())
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_starts_at_exactly_zero_and_keeps_the_contract(name):
    energy = LogRatio(LogRatioEnergy(), base(name))
    # both halves are read by the same code; where memory lies may still round a last bit
    torch.testing.assert_close(energy(X), torch.zeros(4, 3, dtype=torch.float64), atol=1e-5, rtol=0)
    check_energy(moved(energy), X)
    assert energy(X).std() > 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_the_formula(name):
    lm = base(name)
    energy = moved(LogRatio(LogRatioEnergy(alpha=0.7, over="all", pool="sum"), lm))
    q, found = whole_q(energy, lm), energy(X).detach()
    for b, context in enumerate(X.contexts.lists()):
        context = context or [0]
        for n, x in enumerate(X.lists()[b]):
            tokens, wanted = torch.tensor([context + x]), 0.0
            with torch.no_grad():
                log_p, log_q = (model(tokens).logits[0].double().log_softmax(-1) for model in (lm.model, q))
                pooled = q.base_model(tokens).last_hidden_state[0].sum(0)
                wanted = (energy.readout.weight[0] @ pooled + energy.readout.bias[0]).item()
            for t, token in enumerate(x, start=len(context)):
                wanted += energy.alpha.item() * (log_p[t - 1, token] - log_q[t - 1, token]).item()
            assert abs(float(found[b, n]) - wanted) < 1e-4


def test_its_log_probabilities_are_the_bases():
    lm = base()
    energy = LogRatio(LogRatioEnergy(), lm)
    x = Continuations.from_lists([[1, 2], [0]], [[[3, 4], [5]], [[6], []]])
    found = log_prob(energy.trunk(x), energy.head, x)
    torch.testing.assert_close(found.detach(), lm.log_prob(x), atol=1e-5, rtol=0)


def test_with_alpha_one_and_no_readout_the_joint_model_is_q():
    """Σ_x P_LM(x) exp(−E(x)) = Σ_x Q(x) = 1, by enumeration."""
    lm = base(dtype=torch.float64)
    energy = moved(LogRatio(LogRatioEnergy(alpha=1.0), lm), scale=0.1)
    with torch.no_grad():
        energy.alpha.fill_(1.0)
        energy.readout.weight.zero_()
        energy.readout.bias.zero_()
    strings = SequenceSpace(vocab_size=V, length=2, eos=0).enumerate()
    contexts = Continuations.from_lists([[1, 2]], [[[1]]]).contexts
    x = Continuations(contexts, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    with torch.no_grad():
        E = energy(x)
    assert E.std() > 0.01
    assert abs((lm.log_prob(x) - E).logsumexp(-1).item()) < 1e-10


@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX"])
def test_gradients_against_finite_differences(name):
    """Along α alone and along a random direction in everything else, float64."""
    energy = moved(LogRatio(LogRatioEnergy(over="all"), base(name, torch.float64)))
    energy(X).square().sum().backward()
    for chosen in ([energy.alpha], [weight for weight in energy.parameters() if weight is not energy.alpha]):
        ways = [Rng(2).child(i).normal(*weight.shape) for i, weight in enumerate(chosen)]
        wanted = sum(float((weight.grad * way).sum()) for weight, way in zip(chosen, ways, strict=True))
        values = []
        with torch.no_grad():
            for step in (1e-6, -2e-6, 1e-6):
                for weight, way in zip(chosen, ways, strict=True):
                    weight.add_(step * way)
                values.append(float(energy(X).square().sum()))
        assert abs((values[0] - values[1]) / 2e-6 / wanted - 1) < 1e-5


def test_the_base_is_no_part_of_it_and_stays_as_it_was():
    lm = base()
    energy = moved(LogRatio(LogRatioEnergy(), lm)).train()
    own = {weight.data_ptr() for weight in energy.parameters()}
    assert not own & {weight.data_ptr() for weight in lm.model.parameters()}
    assert not lm.model.training
    energy(X).sum().backward()
    assert all(weight.grad is None for weight in lm.model.parameters())
    assert energy.alpha.grad is not None


@pytest.mark.parametrize("name", ["GPTNeoX", "Llama"])
def test_save_and_load_give_equal_bits(name, tmp_path):
    """With output embeddings that are tied to the input's, and with their own."""
    lm = base(name)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    energy = moved(LogRatio(LogRatioEnergy(pool="sum"), lm))
    energy.save_pretrained(tmp_path / "energy")
    again = LogRatio.from_pretrained(tmp_path / "energy", base=lm, tokenizer=Tokenizer(words, eos=0)).eval()
    assert torch.equal(again(X), energy(X))
    assert len(list(again.parameters())) == len(list(energy.parameters()))


def test_bases_that_it_cannot_hold_are_one_sentence():
    with pytest.raises(UserError, match="a TabularLM has no network"):
        LogRatio(LogRatioEnergy(), TabularLM.random(Rng(0), vocab_size=V, order=1))
    capped = base("Gemma2", num_key_value_heads=2, intermediate_size=32, head_dim=4, final_logit_softcapping=0.1)
    with pytest.raises(UserError, match="Gemma2ForCausalLM does not predict by one linear layer"):
        LogRatio(LogRatioEnergy(), capped)
