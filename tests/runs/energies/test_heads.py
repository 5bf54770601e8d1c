"""Heads of networks against loops over places; padding and batches change nothing; what is refused."""

import pytest
import torch

from freenergy import Continuations, UserError
from freenergy.energies.heads import HeadSettings, NeuralHead

V = 7
HEADS = ["hidden", "inner-product", "target-logit", "masked-logit", "token-logit"]
SENTENCES = [[1, 2, 3, 0], [4, 0], [5, 6, 1, 2, 2, 0]]


def made(head, **more):
    torch.manual_seed(0)
    found = NeuralHead(HeadSettings(head=head, width=8, **more), V).double()
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        found.scale.fill_(1.0)
    return found


@pytest.mark.parametrize("encoder", ["cnn", "blstm", "cnn-blstm"])
@pytest.mark.parametrize("head", HEADS)
def test_padding_and_batches_change_nothing(head, encoder):
    energy = made(head, encoder=encoder)
    together = energy(Continuations.from_lists([[]], [SENTENCES]))[0]
    alone = [energy(Continuations.from_lists([[]], [[row]]))[0, 0].item() for row in SENTENCES]
    assert together.tolist() == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_training_starts_at_zero_and_has_gradients(head):
    energy = NeuralHead(HeadSettings(head=head, width=8), V)
    E = energy(Continuations.from_lists([[]], [SENTENCES]))
    assert E.abs().max() == 0
    E.sum().backward()
    assert energy.scale.grad is not None
    assert energy.scale.grad.abs() > 0


def test_a_masked_logit_is_a_loop_of_single_masks():
    energy, row = made("masked-logit"), torch.tensor([SENTENCES[2]])
    everywhere, total = torch.ones_like(row, dtype=torch.bool), 0.0
    for i in range(row.shape[1]):
        e = energy.encoder.embedding(row).clone()
        e[0, i] = energy.mask_embedding
        total += energy.logits(energy.encoder(e, everywhere))[0, i, row[0, i]].item()
    assert energy.potential(row, everywhere).item() == pytest.approx(total, abs=1e-12)


def test_a_target_logit_reads_only_what_stands_before():
    energy, row = made("target-logit"), torch.tensor([SENTENCES[2]])
    total = 0.0
    for i in range(row.shape[1]):
        e = torch.cat([energy.start.view(1, 1, -1), energy.encoder.embedding(row[:, :i])], dim=1)
        total += energy.logits(energy.forward_lstm(e)[0])[0, -1, row[0, i]].item()
    assert energy.potential(row, torch.ones_like(row, dtype=torch.bool)).item() == pytest.approx(total, abs=1e-12)


def test_an_inner_product_is_the_sum_of_neighbours_and_zero_for_one_word():
    energy, row = made("inner-product"), torch.tensor([SENTENCES[0]])
    e = energy.encoder.embedding(row)
    ahead, back = energy.forward_lstm(e)[0][0], energy.backward_lstm(e.flip(1))[0].flip(1)[0]
    by_hand = sum(ahead[i] @ e[0, i + 1] + back[i + 1] @ e[0, i] for i in range(3)).item()
    assert energy.potential(row, torch.ones_like(row, dtype=torch.bool)).item() == pytest.approx(by_hand, abs=1e-12)
    assert energy.potential(torch.tensor([[3]]), torch.tensor([[True]])).item() == 0


def test_a_mean_is_the_sum_over_the_length():
    x = Continuations.from_lists([[]], [SENTENCES])
    ratio = made("hidden")(x) / made("hidden", pool="mean")(x)
    assert ratio[0].tolist() == pytest.approx([4, 2, 6], abs=1e-9)


def test_what_is_refused():
    long = Continuations.from_lists([[]], [[[1] * 50 + [0]]])
    with pytest.raises(UserError, match="51 times"):
        made("masked-logit")(long)
    assert made("masked-logit", max_masked=60)(long).isfinite().all()
    with pytest.raises(UserError, match="empty context"):
        made("hidden")(Continuations.from_lists([[1]], [[[0]]]))
    with pytest.raises(UserError, match="even width"):
        HeadSettings(width=7)
