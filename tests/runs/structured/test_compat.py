"""The drop-in for pytorch-crf: its published behaviour, and what its users asked for or ran into."""

import itertools
import math

import pytest
import torch

from freenergy import Rng
from freenergy.structured import NO_LABEL, Allowed, bio
from freenergy.structured.compat import CRF

T, B, K = 3, 2, 5


def number(tensor):
    return tensor.detach().item()


def layer(**more):
    torch.manual_seed(5)
    crf = CRF(K, **more)
    for parameter in crf.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    return crf.double()


def data(seed=0):
    torch.manual_seed(seed)
    return torch.randn(T, B, K, dtype=torch.float64), torch.tensor([[0, 1], [2, 4], [3, 1]])


def score(crf, emissions, tags):
    """In plain Python: emissions [T, K] of one sequence, its tags."""
    total = crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]
    total = total + sum(emissions[t, k] for t, k in enumerate(tags))
    return number(total + sum(crf.transitions[j, k] for j, k in itertools.pairwise(tags)))


def log_likelihood(crf, emissions, tags):
    every = [score(crf, emissions, y) for y in itertools.product(range(crf.num_tags), repeat=len(tags))]
    return score(crf, emissions, tags) - math.log(sum(map(math.exp, every)))


# what its documentation and its own tests say


def test_the_constructor_and_the_parameters():
    crf = CRF(10)
    assert (crf.num_tags, crf.batch_first, repr(crf)) == (10, False, "CRF(num_tags=10)")
    shapes = {name: tuple(p.shape) for name, p in crf.named_parameters()}
    assert shapes == {"start_transitions": (10,), "end_transitions": (10,), "transitions": (10, 10)}
    assert all(number(p.abs().max()) <= 0.1 for p in crf.parameters())
    with pytest.raises(ValueError, match="invalid number of tags: 0"):
        CRF(0)


@pytest.mark.parametrize("mask", [None, [[1, 1], [1, 1], [1, 0]]], ids=["full", "mask"])
def test_the_log_likelihood_is_that_of_all_taggings(mask):
    crf, (x, y) = layer(), data()
    lengths = [3, 3] if mask is None else [3, 2]
    mask = mask if mask is None else torch.tensor(mask, dtype=torch.uint8)
    wanted = [log_likelihood(crf, x[:n, b], y[:n, b].tolist()) for b, n in enumerate(lengths)]
    assert crf(x, y, mask=mask, reduction="none").tolist() == pytest.approx(wanted, abs=1e-12)
    assert number(crf(x, y, mask=mask)) == pytest.approx(sum(wanted), abs=1e-12)
    assert number(crf(x, y, mask=mask, reduction="mean")) == pytest.approx(sum(wanted) / 2, abs=1e-12)
    assert number(crf(x, y, mask=mask, reduction="token_mean")) == pytest.approx(sum(wanted) / sum(lengths), abs=1e-12)


def test_decoding_finds_the_best_of_all_taggings():
    crf, (x, _) = layer(), data(3)
    every = list(itertools.product(range(K), repeat=T))
    assert crf.decode(x) == [list(max(every, key=lambda y: score(crf, x[:, b], y))) for b in range(B)]
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.uint8)
    short = [list(y) for y in itertools.product(range(K), repeat=2)]
    assert crf.decode(x, mask=mask)[1] == max(short, key=lambda y: score(crf, x[:2, 1], y))


def test_batch_first_and_batches_change_nothing():
    crf, (x, y) = layer(), data()
    first = layer(batch_first=True)
    assert number(first(x.transpose(0, 1), y.T)) == pytest.approx(number(crf(x, y)), abs=1e-12)
    assert first.decode(x.transpose(0, 1)) == crf.decode(x)
    apart = sum(number(crf(x[:, b : b + 1], y[:, b : b + 1])) for b in range(B))
    assert number(crf(x, y)) == pytest.approx(apart, abs=1e-12)


def test_gradients_reach_all_parameters():
    crf, (x, y) = layer(), data()
    crf(x, y).backward()
    assert all(bool(p.grad.isfinite().all()) and number(p.grad.abs().max()) > 0 for p in crf.parameters())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda crf, x, y: crf(x[0], y), "emissions must have dimension of 3, got 2"),
        (lambda crf, x, y: crf(x[..., :2], y), "expected last dimension of emissions is 5, got 2"),
        (lambda crf, x, y: crf(x, y[:2]), r"emissions and tags must match, got \(3, 2\) and \(2, 2\)"),
        (
            lambda crf, x, y: crf(x, y, mask=torch.ones(2, 2)),
            r"emissions and mask must match, got \(3, 2\) and \(2, 2\)",
        ),
        (lambda crf, x, y: crf.decode(x, mask=torch.ones(2, 2)), "emissions and mask must match"),
        (lambda crf, x, y: crf(x, y, reduction="foo"), "invalid reduction: foo"),
    ],
)
def test_errors_are_the_same_kind_with_the_same_words(call, match):
    with pytest.raises(ValueError, match=match):
        call(layer(), *data())


def test_weights_of_pytorch_crf_load():
    torchcrf = pytest.importorskip("torchcrf")
    theirs, (x, y) = torchcrf.CRF(K).double(), data()
    ours = CRF(K).double()
    ours.load_state_dict(theirs.state_dict())
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    assert number(ours(x, y, mask=mask)) == pytest.approx(number(theirs(x, y, mask=mask).detach()), abs=1e-12)
    assert ours.decode(x, mask=mask) == theirs.decode(x, mask=mask)


# its issues, by number


def test_36_48_51_and_pull_21_marginals_and_the_probability_of_the_decoded_tags():
    crf, (x, _) = layer(), data()
    probs = crf.marginals(x)
    assert probs.shape == x.shape
    torch.testing.assert_close(probs.sum(-1), torch.ones(T, B).double(), atol=1e-12, rtol=0)
    best = torch.tensor(crf.decode(x)).T
    wanted = [log_likelihood(crf, x[:, b], best[:, b].tolist()) for b in range(B)]
    assert crf(x, best, reduction="none").tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("hole", [[0, 1, 1], [1, 0, 1], [0, 1, 0]])
def test_46_53_61_77_85_110_positions_may_be_masked_anywhere(hole):
    """[CLS] first, word pieces inside: the same as without these positions; all taggings sum to one."""
    crf, (x, y) = layer(), data()
    kept = torch.tensor(hole).bool()
    mask = kept.unsqueeze(1).expand(T, B)
    assert number(crf(x, y, mask=mask)) == pytest.approx(number(crf(x[kept], y[kept])), abs=1e-12)
    assert crf.decode(x, mask=mask) == crf.decode(x[kept])
    every = [
        torch.tensor([k if on else 0 for k, on in zip(path, hole, strict=True)])
        for path in itertools.product(range(K), repeat=T)
        if all(on or k == 0 for k, on in zip(path, hole, strict=True))
    ]
    total = sum(number(crf(x[:, :1], path.unsqueeze(1), mask=mask[:, :1]).exp()) for path in every)
    assert total == pytest.approx(1.0, abs=1e-12)


def test_63_90_120_forbidden_transitions():
    """Booleans: probability exactly zero, also at the start and the end, never decoded, and no NaN in gradients."""
    names = ["O", "B-A", "I-A", "B-B", "I-B"]
    crf = layer(allowed=bio(names))
    torch.manual_seed(1)
    x = torch.randn(6, 50, K, dtype=torch.float64, requires_grad=True)
    for tags in crf.decode(x):
        assert tags[0] not in (2, 4)
        assert all(k not in (2, 4) or j in (k, k - 1) for j, k in itertools.pairwise(tags))
    bad = torch.full((6, 50), 2)
    assert (crf(x, bad, reduction="none") == -math.inf).all()
    (-crf(x, torch.zeros(6, 50).long())).backward()
    assert bool(x.grad.isfinite().all())
    assert number(crf.transitions.grad[0, 2]) == 0  # O → I-A is never used


def test_a_tag_that_no_path_reaches_leaves_gradients_finite():
    """Transitions of −inf: pytorch-crf's gradients are NaN."""
    crf, (x, y) = layer(), data()
    crf.transitions.data[:, 4] = -math.inf
    crf.start_transitions.data[4] = -math.inf
    x.requires_grad_()
    crf(x, y.clamp(max=3)).backward()
    assert bool(x.grad.isfinite().all())
    assert bool(crf.transitions.grad.isfinite().all())


def test_107_k_best():
    crf, (x, _) = layer(), data()
    top = crf.top_k(x, 4)
    every = sorted(itertools.product(range(K), repeat=T), key=lambda y: -score(crf, x[:, 0], y))
    assert top.labels[0].tolist() == [list(y) for y in every[:4]]


def test_79_80_decoding_gives_a_tensor():
    crf, (x, _) = layer(), data()
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    best = crf.best(x, mask).labels
    assert best.shape == (B, T)
    assert [[k for k in row if k != NO_LABEL] for row in best.tolist()] == crf.decode(x, mask)


def test_124_the_log_likelihood_is_never_positive():
    """The returned number is a log-probability: the loss is ≥ 0, for large numbers and half precision too."""
    crf = layer().float()
    for scale in (1, 100, 1e4):
        x = torch.randn(30, 8, K) * scale
        y = torch.tensor(crf.decode(x)).T
        assert (crf(x, y, reduction="none") <= 1e-2 * scale / 100 + 1e-4).all()
        assert (crf(x.bfloat16(), y, reduction="none") <= 1e-2 * scale / 100 + 1e-4).all()


def test_72_and_35_speed_and_memory():
    """No graph of T steps: one node of autograd holds everything (measured in benchmarks/bench_chain.py)."""
    crf = layer()
    node = crf.distribution(torch.randn(40, 4, K, dtype=torch.float64)).log_partition().grad_fn
    assert type(node).__name__ == "_LogPartitionBackward"
    assert sum(fn is not None for fn, _ in node.next_functions) == 3  # the three parameters, and nothing in between


def test_draws_and_empty_rows():
    crf, (x, y) = layer(), data()
    draws = crf.sample(x, 7, Rng(0))
    assert draws.shape == (B, 7, T)
    nothing = torch.tensor([[1, 0], [1, 0], [1, 0]]).bool()
    assert number(crf(x, y, mask=nothing, reduction="none")[1]) == 0
    assert crf.decode(x, mask=nothing)[1] == []


def test_start_and_end_constraints_hold_too():
    rules = Allowed(start=torch.arange(K) != 0, end=torch.arange(K) != 1)
    crf = layer(allowed=rules)
    for tags in crf.decode(torch.randn(4, 60, K, dtype=torch.float64) * 3):
        assert tags[0] != 0
        assert tags[-1] != 1
