"""Laws of tags against all taggings: probabilities, gradients, beams, early updates, losses."""

from itertools import pairwise, product

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.structured import LinearChain, bio
from freenergy.tagging.laws import ChainHead
from freenergy.tagging.losses import expected_cost, negative_log_prob
from freenergy.tagging.reading import Labels
from freenergy.tagging.settings import MinimumRisk
from freenergy.tagging.transducers import TransducerHead

K, T = 3, 4
EVERY = torch.tensor(list(product(range(K), repeat=T))).unsqueeze(0)  # [1, 81, 4]


def head(law, *, history="lstm", design=1, beam=4, seed=0):
    torch.manual_seed(seed)
    if law in ("softmax", "memm", "crf"):
        made = ChainHead(law, 5, K, None)
    else:
        made = TransducerHead(law, 5, K, design=design, history=history, label_width=6, beam=beam)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.8)
    return made.double()


def states(seed=1, rows=1):
    torch.manual_seed(seed)
    return torch.randn(rows, T, 5, dtype=torch.float64), torch.full((rows,), T)


@pytest.mark.parametrize("law", ["softmax", "memm", "crf", "rnnt"])
def test_probabilities_sum_to_one_and_marginals_are_their_sums(law):
    found = head(law)(*states())
    log_p = torch.stack([found.log_prob(y.unsqueeze(0)) for y in EVERY[0]]).squeeze(1)
    assert found.is_exact
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-12)
    best = EVERY[0, log_p.argmax()]
    if law != "rnnt":
        marginals = torch.zeros(T, K, dtype=torch.float64)
        for y, p in zip(EVERY[0], log_p.exp(), strict=True):
            marginals[range(T), y] += p
        assert torch.allclose(found.marginals()[0], marginals, atol=1e-12)
        assert found.argmax().labels[0].equal(best)
        sets = torch.rand(1, T, K, generator=torch.Generator().manual_seed(3)) < 0.7
        sets[0, 0] = True
        sets[..., 0] = True
        agrees = sets[0][range(T), EVERY[0]].all(1)
        assert found.partial_log_prob(sets).item() == pytest.approx(log_p[agrees].logsumexp(0).item(), abs=1e-12)


def test_shorter_sentences_have_the_law_that_they_have_alone():
    h, _ = states(rows=2)
    lengths = torch.tensor([T, 2])
    y = torch.tensor([[0, 1, 2, 0], [2, 1, -1, -1]])
    for law in ("softmax", "memm", "crf", "rnnt", "transducer"):
        made = head(law, beam=K**T)
        both = made(h, lengths).log_prob(y)
        alone = made(h[1:, :2], torch.tensor([2])).log_prob(y[1:, :2])
        assert both[1].item() == pytest.approx(alone.item(), abs=1e-12), law


def exact_log_z(law):
    return law.log_score(EVERY).logsumexp(1)


@pytest.mark.parametrize("design", [1, 2])
def test_a_beam_of_all_taggings_is_exact_and_a_narrow_one_is_a_lower_bound(design):
    made, (h, lengths) = head("transducer", design=design, beam=K**T), states()
    law, y = made(h, lengths), torch.tensor([[0, 2, 1, 1]])
    log_z = exact_log_z(law)
    assert law.log_partition_bound().item() == pytest.approx(log_z.item(), abs=1e-12)
    nats = law.loss(y, early_update=True)
    exact = log_z - law.log_score(y.unsqueeze(1))[:, 0]
    assert nats.item() == pytest.approx(exact.item(), abs=1e-12)
    weights = list(made.parameters())
    ours = torch.autograd.grad(nats.sum(), weights, retain_graph=True)
    theirs = torch.autograd.grad(exact.sum(), weights)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    bounds = []
    for beam in (1, 2, 5, 20):
        made.beam = beam
        bounds.append(made(h, lengths).log_partition_bound().item())
    assert all(bound <= log_z.item() + 1e-12 for bound in bounds)
    assert bounds[0] < bounds[-1]
    assert law.argmax().labels.equal(EVERY[:, law.log_score(EVERY).argmax()])


def test_a_prediction_network_that_sees_the_last_tag_is_a_linear_chain():
    made, (h, lengths) = head("transducer", history="last", beam=K**T), states()
    table = made.predict.table.weight
    chain = LinearChain(made.emit(h), table[:K], start=table[K], lengths=lengths)
    law = made(h, lengths)
    assert law.log_partition_bound().item() == pytest.approx(chain.log_partition().item(), abs=1e-12)
    for y in EVERY[0, ::7]:
        assert law.log_prob(y.unsqueeze(0)).item() == pytest.approx(chain.log_prob(y.unsqueeze(0)).item(), abs=1e-12)


def test_without_history_all_three_are_the_same():
    """G constant in the history: transducer (design 1), RNN-T and independent softmaxes agree."""
    made = head("transducer", history="last", beam=K**T)
    with torch.no_grad():
        made.predict.table.weight.copy_(made.predict.table.weight[:1].expand(K + 1, K))
    local = head("rnnt", history="last")
    local.load_state_dict(made.state_dict())
    h, lengths = states()
    y = torch.tensor([[1, 0, 2, 2]])
    plain = (made.emit(h) + made.predict.table.weight[0]).log_softmax(2).gather(2, y.unsqueeze(2)).sum()
    assert made(h, lengths).log_prob(y).item() == pytest.approx(plain.item(), abs=1e-12)
    assert local(h, lengths).log_prob(y).item() == pytest.approx(plain.item(), abs=1e-12)


def test_the_early_update_s_gradient_is_that_of_the_truncated_loss():
    """Finite differences of −u(y*_1:j) + log Σ over B_j ∪ {y*}, with the beam written out by hand."""
    made, (h, lengths) = head("transducer", beam=2, seed=4), states(5)
    law = made(h, lengths)
    y = next(y for y in EVERY[0] if 1 < law.search(y.unsqueeze(0)).fell_at.item() < T).unsqueeze(0)
    j = law.search(y).fell_at.item()
    beam = {(): 0.0}
    for _ in range(j):  # search by hand
        longer = {(*prefix, k): score(made, h, (*prefix, k)).item() for prefix in beam for k in range(K)}
        beam = dict(sorted(longer.items(), key=lambda item: -item[1])[:2])
    gold = tuple(y[0, :j].tolist())
    assert gold not in beam

    def truncated():
        every = torch.stack([score(made, h, prefix) for prefix in [gold, *beam]])
        return every.logsumexp(0) - every[0]

    loss = law.loss(y, early_update=True)
    assert loss.item() == pytest.approx(truncated().item(), abs=1e-12)
    loss.sum().backward()
    for weight in made.parameters():
        flat, grad = weight.data.view(-1), weight.grad.view(-1)
        for i in range(0, len(flat), max(1, len(flat) // 5)):
            old = flat[i].item()
            ends = []
            for step in (1e-6, -1e-6):
                flat[i] = old + step
                ends.append(truncated().item())
            flat[i] = old
            assert grad[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)
    whole = law.loss(y, early_update=False)
    assert whole.item() != pytest.approx(loss.item(), abs=1e-6)  # the mutant that ignores the update


def score(made, h, prefix):
    y = torch.tensor([[*prefix, *[0] * (T - len(prefix))]])
    return made(h, torch.tensor([T])).log_score(y.unsqueeze(1), torch.tensor([len(prefix)]))[0, 0]


@pytest.mark.statistical
def test_rnnt_draws_have_its_law():
    """χ² of 20,000 draws in the cells of 5 or more; p below 1e-6 once in a million runs."""
    from scipy.stats import chisquare

    law = head("rnnt")(*states())
    p = law.log_prob(EVERY[0].unsqueeze(0).expand(1, -1, -1)[0, :1]).new_tensor(
        [law.log_prob(y.unsqueeze(0)).exp().item() for y in EVERY[0]]
    )
    drawn = law.sample(20_000, Rng(0))[0]
    cells = (drawn * torch.tensor([27, 9, 3, 1])).sum(1).bincount(minlength=81).double()
    big = p * 20_000 >= 5
    seen = torch.cat([cells[big], cells[~big].sum().view(1)])
    wanted = torch.cat([p[big], p[~big].sum().view(1)]) * 20_000
    assert chisquare(seen.numpy(), wanted.numpy()).pvalue > 1e-6
    wrong = (p.flip(0) * 20_000).clamp(min=1e-3)
    assert chisquare(cells.numpy(), (wrong * cells.sum() / wrong.sum()).numpy()).pvalue < 1e-6


@pytest.mark.parametrize("cost", ["words", "spans"])
def test_minimum_risk_over_all_taggings_is_the_expected_cost(cost):
    names, y = ("O", "B-X", "I-X"), torch.tensor([[1, 2, 0, 1]])
    law = head("crf")(*states())
    found = expected_cost(law, y, torch.tensor([T]), MinimumRisk(k=K**T, cost=cost), names)
    p = torch.stack([law.log_prob(each.unsqueeze(0)) for each in EVERY[0]]).squeeze(1).exp()
    if cost == "words":
        wanted = (p * (EVERY[0] != y).sum(1)).sum()
    else:
        from freenergy.tagging.scores import count, rates

        gold = [[names[k] for k in y[0].tolist()]]
        f1 = [rates(count(gold, [[names[k] for k in each.tolist()]]))["F1 %"] for each in EVERY[0]]
        wanted = (p * T * (1 - torch.tensor(f1, dtype=torch.float64) / 100)).sum()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6 if cost == "spans" else 1e-12)


def test_constraints_hold_in_every_law_that_searches_a_chain():
    names = ("O", "B-X", "I-X")
    h, lengths = states(rows=1)
    for law in ("softmax", "memm", "crf"):
        made = head(law)
        made.allowed = bio(names)
        for seed in range(30):
            y = made(torch.randn(h.shape, generator=torch.Generator().manual_seed(seed)).double(), lengths).argmax()
            tags = ["O", *(names[k] for k in y.labels[0].tolist())]
            assert all(b != "I-X" or a in ("B-X", "I-X") for a, b in pairwise(tags)), law


def test_a_constrained_beam_sums_over_what_the_scheme_allows():
    names, (h, lengths) = ("O", "B-X", "I-X"), states()
    made = head("transducer", beam=K**T)
    made.allowed = bio(names)
    law = made(h, lengths)
    tags = [["O", *(names[k] for k in y)] for y in EVERY[0].tolist()]
    valid = torch.tensor([all(b != "I-X" or a != "O" for a, b in pairwise(each)) for each in tags])
    scores = law.log_score(EVERY)[0]
    assert law.log_partition_bound().item() == pytest.approx(scores[valid].logsumexp(0).item(), abs=1e-12)
    assert law.argmax().labels[0].equal(EVERY[0][valid][scores[valid].argmax()])


def test_partial_labels_of_a_transducer_are_refused():
    law = head("transducer")(*states())
    with pytest.raises(UserError, match="exact sum"):
        negative_log_prob(law, Labels(EVERY[0, :1], torch.ones(1, T, K, dtype=torch.bool)), True)
