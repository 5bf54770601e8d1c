"""Corrected language models: they sum to one, begin as the base, and their gradients are those of the likelihood."""

import pytest
import torch

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, UserError
from freenergy.lm.checkpoints import load_checkpoint, save_checkpoint
from freenergy.testing import check_language_model
from freenergy.training.baselines import residual
from freenergy.training.baselines.residual import Ralm, network_reader
from freenergy.training.baselines.training import cross_entropy

CONTEXTS = [[1, 2, 3, 1, 2], [3], [], [2, 0, 1]]
KINDS = ["ralm", "probe", "both"]
ROWS = torch.tensor([[1, 2, 3, 1, 4, 0, 2], [4, 4, 0, 1, 3, 2, 1]])


def some():
    return Continuations.from_lists(CONTEXTS, [[[1, 2, 4], [3], []]] * 4)


@pytest.mark.parametrize("kind", ["ralm", "both"])
def test_contract(make_model, kind):
    model = make_model(kind)
    for part in model.corrections:
        part.requires_grad_(False)
    check_language_model(model, contexts=CONTEXTS, length=2, tolerance=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_as_the_base(make_model, kind):
    model = make_model(kind, at_zero=True)
    torch.testing.assert_close(model.log_prob(some()), model.base.log_prob(some()), atol=2e-6, rtol=0)
    contexts = Sequences.from_lists(CONTEXTS)
    wanted = model.base.next_log_probs(contexts)
    torch.testing.assert_close(model.next_log_probs(contexts).to(wanted), wanted, atol=2e-6, rtol=0)
    moved = make_model(kind, base=model.base)
    assert (moved.log_prob(some()) - model.log_prob(some())).abs().max() > 0.05


@pytest.mark.parametrize("name", ["GPT2", "Llama", "GPTNeoX", "Mamba"])
def test_ralm_is_equation_6(network, name, tmp_path):
    """log P = log P_LM + log P_φ + const, from two models that know nothing of each other; also when reopened."""
    base = network(name)
    ralm = Ralm.from_base(base.model)
    assert not any(weight.any() for weight in ralm.network.get_output_embeddings().parameters())
    with torch.no_grad():
        head = ralm.network.get_output_embeddings().weight
        head.copy_(0.3 * Rng(6).normal(*head.shape))
    contexts = Sequences.from_lists([[1, 2, 3], [4, 1]])
    found = residual.ResidualLM(base, [ralm]).next_log_probs(contexts)
    other = HuggingFaceLM(ralm.network, eos=0)
    product = (base.next_log_probs(contexts) + other.next_log_probs(contexts)).exp()
    torch.testing.assert_close(found.exp(), product / product.sum(-1, keepdim=True), atol=1e-6, rtol=0)
    save_checkpoint(ralm.network, tmp_path / "model", eos=0)
    again = residual.ResidualLM(base, [Ralm(load_checkpoint(tmp_path / "model")[0]).eval()])
    assert torch.equal(again.next_log_probs(contexts), found)


def test_the_copy_is_not_the_base(network):
    """Training the residual must not move the base through a shared weight."""
    base = network("GPT2")  # its embeddings are tied to its head
    own = {weight.data_ptr() for weight in base.model.parameters()}
    ralm = Ralm.from_base(base.model)
    assert all(weight.requires_grad for weight in ralm.parameters())
    assert not own & {weight.data_ptr() for weight in ralm.parameters()}
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (base.model, ralm)]
    assert sizes[1] == sizes[0] + 5 * 16  # a head of its own


@pytest.mark.parametrize("kind", ["ralm", "probe", "both"])
def test_gradients_by_finite_differences(make_model, network, kind):
    model = make_model(kind, base=network("GPT2", dtype=torch.float64))
    parameters = [weight for part in model.corrections for weight in part.parameters()]
    gradients = torch.autograd.grad(cross_entropy(model, ROWS), parameters)
    for i, (weight, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        direction = Rng(7).child(i).normal(*weight.shape)
        slopes, step = [], 1e-5
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * step)
                slopes.append(sign * cross_entropy(model, ROWS).item())
                weight.sub_(direction, alpha=sign * step)
        wanted = sum(slopes) / (2 * step)
        assert (gradient * direction).sum().item() == pytest.approx(wanted, rel=1e-5, abs=1e-8), f"weight {i}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_likelihood(make_model, kind):
    model = make_model(kind)
    x = Continuations.from_lists([row[:1] for row in ROWS.tolist()], [[row[1:]] for row in ROWS.tolist()])
    wanted = -model.log_prob(x).sum().item() / (ROWS.shape[1] - 1) / len(ROWS)
    assert cross_entropy(model, ROWS).item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("kind", ["ralm", "both"])
def test_few_places_at_a_time_change_nothing(make_model, network, kind):
    """A large vocabulary is read in small parts: values and gradients are those of the whole."""
    base = network("GPT2", dtype=torch.float64)
    results = []
    for places, rows in ((1000, 64), (3, 1)):
        model = make_model(kind, base=base)
        model.places_at_once = places
        before, residual._ROWS = residual._ROWS, rows
        try:
            loss = cross_entropy(model, ROWS)
            gradients = torch.autograd.grad(loss, list(model.corrections[0].parameters()))
            results.append([loss, *gradients, model.log_prob(some()), model.next_log_probs(some().contexts)])
        finally:
            residual._ROWS = before
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-12, rtol=1e-12)


def test_no_array_of_predictions_is_large(network, monkeypatch):
    """With 49,152 tokens, no call makes predictions of more than 64 MB."""
    base = network("GPT2", vocab_size=49_152)
    model = residual.ResidualLM(base, [Ralm.from_base(base.model)])
    sizes = []
    plain = torch.nn.Linear.forward

    def spy(self, x):
        out = plain(self, x)
        sizes.append(out.numel() * out.element_size())
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", spy)
    rows = torch.arange(16 * 24).view(16, 24)
    cross_entropy(model, rows).backward()
    assert max(sizes) > 2**20
    assert max(sizes) <= 2**26
    whole = 16 * 23 * 49_152 * 4
    assert whole > 2**26  # what it would have been at once


def test_an_architecture_that_bends_its_logits_is_refused(network):
    base = network("Cohere", logit_scale=0.3, num_key_value_heads=2)
    with pytest.raises(UserError, match="does more to its last states than its head says"):
        network_reader(base.model)


def test_a_mutant_that_looks_ahead_is_found(make_model):
    """A correction that looks one token ahead is no language model, and the contract finds it."""
    model = make_model("probe")
    probe = model.corrections[0].requires_grad_(False)

    class PrefetchFn(torch.nn.Module):
        def forward(self, rows, reading):
            f = probe(rows, reading)

            def peek(at, log_p):
                nxt = rows.tokens[at.row, (at.place + 1).clamp(max=rows.tokens.shape[1] - 1)]
                return f(at, log_p) + 0.5 * torch.nn.functional.one_hot(nxt, log_p.shape[1])

            return peek

    with pytest.raises(AssertionError, match="sum to one"):
        check_language_model(
            residual.ResidualLM(model.base, [PrefetchFn()], layers=(1, 2)), contexts=CONTEXTS, tolerance=1e-5
        )
