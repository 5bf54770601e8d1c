"""A batch of small chains with every kind of mask, transition and constraint, and the lists of all their taggings."""

import math

import torch

from freenergy import Rng
from freenergy.structured import NO_LABEL, Allowed, LinearChain
from freenergy.testing import enumerate_chain

B, T, K = 3, 4, 3
MASKS = {
    "full": [[1, 1, 1, 1]] * B,
    "lengths": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
    "holes": [[0, 1, 0, 1], [1, 0, 1, 1], [0, 0, 1, 0]],
    "single": [[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]],
    "empty": [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
}


def numbers(*shape, seed=0, scale=1.0):
    return scale * Rng(seed).child("numbers", *shape).normal(*shape)


def constraints(kind):
    some = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()
    sets = torch.ones(B, T, K, dtype=torch.bool)
    sets[0, 1, 0] = sets[1, 0, 2] = sets[2, 2, 0] = False
    return {
        "free": None,
        "pairs": Allowed(pairs=some),
        "all": Allowed(
            pairs=some, start=torch.tensor([True, True, False]), end=torch.tensor([False, True, True]), labels=sets
        ),
    }[kind]


def case(mask="full", steps="shared", allowed="free", *, seed=0, scale=1.0, **more):
    """A batch, and the list of taggings of each of its rows."""
    shape = {"shared": (K, K), "positions": (T - 1, K, K), "rows": (B, T - 1, K, K)}[steps]
    x, A = numbers(B, T, K, seed=seed, scale=scale), numbers(*shape, seed=seed + 1, scale=scale)
    start, end = numbers(K, seed=seed + 2), numbers(K, seed=seed + 3)
    kept, rules = torch.tensor(MASKS[mask]).bool(), constraints(allowed)
    chain = LinearChain(x, A, start=start, end=end, mask=kept, allowed=rules, **more)
    lists = [
        enumerate_chain(x[b], A, start=start, end=end, mask=kept[b].tolist(), allowed=rules, row=b) for b in range(B)
    ]
    return chain, lists


def stacked(lists, number):
    return torch.stack([torch.as_tensor(number(one), dtype=torch.float64) for one in lists])


def close(found, wanted, tolerance=1e-12):
    gap = torch.where(found == wanted, 0.0, (found - wanted).abs())  # −inf equals −inf
    assert gap.max() <= tolerance, gap.max()


def check_every_method(chain, lists, is_full):
    """Every number of a batch against the lists of its rows."""
    close(chain.log_partition(), stacked(lists, lambda one: one.log_partition()))
    close(chain.marginals(), stacked(lists, lambda one: one.marginals(K)))
    close(chain.pair_marginals(), stacked(lists, lambda one: one.pair_marginals(K)))
    close(chain.entropy(), stacked(lists, lambda one: one.entropy()))
    best = chain.argmax()
    close(best.log_score, stacked(lists, lambda one: one.log_score.max()))
    assert torch.equal(best.labels, torch.stack([one.best(1).labels[0] for one in lists]))
    for b, one in enumerate(lists):
        num = len(one.labels)
        y = one.labels.expand(B, num, T)
        close(chain.log_prob(y)[b] if is_full else row(chain, b, one.labels), one.probs().log())
        some = chain.top_k(min(num, 7) + 1)
        wanted = one.best(min(num, 7) + 1)
        size = len(wanted.log_score)
        close(some.log_score[b, :size], wanted.log_score)
        valid = wanted.log_score > -math.inf
        assert torch.equal(some.labels[b, :size][valid], wanted.labels[valid])
        assert (some.labels[b, :size][~valid] == NO_LABEL).all()
        assert (some.log_score[b, size:] == -math.inf).all()


def row(chain, b, labels):
    """log_prob of the taggings of row b; the other rows have labels of their own."""
    y = chain.argmax().labels.unsqueeze(1).repeat(1, len(labels), 1)
    y[b] = labels
    return chain.log_prob(y)[b]
