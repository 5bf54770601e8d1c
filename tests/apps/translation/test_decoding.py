"""Search in batches, and the exact law of energy re-sampling."""

import itertools
import math

import pytest
import torch

from freenergy.apps.translation.decoding import Decoding, candidates
from freenergy.apps.translation.pairs import sources
from freenergy.core.progress import Silent
from freenergy.core.rng import Rng
from freenergy.testing import branches

EOS = 0
SOURCE = [2, 1, 3, EOS]


def strings(network, source, length):
    """Every string with log q and S at its last token, by plain passes of the model."""
    found, begun = {}, {(): 0.0}
    for _ in range(length):
        longer = {}
        for prefix, log_q in begun.items():
            read = torch.tensor([[network.start, *prefix]])
            with torch.no_grad():
                logits = network.model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0, -1]
            for token, log_p in enumerate(logits.log_softmax(-1).tolist()):
                one = (log_q + log_p, logits.logsumexp(-1).item())
                longer[(*prefix, token)] = one
        found |= {string: one for string, one in longer.items() if string[-1] == EOS}
        begun = {string: one[0] for string, one in longer.items() if string[-1] != EOS}
        cut = {string: one for string, one in longer.items() if string[-1] != EOS}
    return found | cut


def resampling_law(known, K, weigh):
    """Σ over lists of K candidates of Π q · (share of each)."""
    total = dict.fromkeys(known, 0.0)
    for chosen in itertools.product(known, repeat=K):
        chance = math.exp(sum(known[string][0] for string in chosen))
        weights = [math.exp(known[string][1]) if weigh else 1.0 for string in chosen]
        for string, weight in zip(chosen, weights, strict=True):
            total[string] += chance * weight / sum(weights)
    return total


def distance(p, q):
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in {*p, *q}) / 2


def test_the_law_of_resampling_is_that_of_the_weights(make_tiny):
    network, source = make_tiny(3), [2, 1, EOS]
    known = strings(network, source, 2)
    exact, unweighted = (resampling_law(known, 2, weigh) for weigh in (True, False))
    assert math.fsum(exact.values()) == pytest.approx(1, abs=1e-9)
    found, first = dict.fromkeys(known, 0.0), dict.fromkeys(known, 0.0)
    for chance, made in branches(lambda rng: Decoding(network, 2, 100).resample([source], [2], rng, Silent())[2]):
        found[tuple(made.drawn[0])] += chance
        first[tuple(made.first[0])] += chance
    assert distance(found, exact) < 1e-9
    assert distance(unweighted, exact) > 0.01  # the mutant that forgets S
    assert distance(first, {string: math.exp(log_q) for string, (log_q, _) in known.items()}) < 1e-9


def test_weights_are_those_of_equation_4(tiny):
    """q(y_<last) · e^{f(y_last)} = q(y) · e^S."""
    known = strings(tiny, SOURCE, 3)
    tokens, mask, S = candidates(tiny, sources([SOURCE], [0]), 40, 3, Rng(4))
    assert len({int(length) for length in mask.sum(2).flatten()}) == 3
    for k in range(40):
        string = tuple(tokens[0, k][mask[0, k]].tolist())
        assert S[0, k].item() == pytest.approx(known[string][1], abs=1e-9)


def test_the_highest_has_the_largest_sum_and_a_smaller_number_the_first_candidates(tiny):
    sentences = [[1, 2, EOS], SOURCE, [3, EOS], [2, 2, 2, 2, EOS]]
    made = Decoding(tiny, 4, 30).resample(sentences, [1, 3, 6], Rng(8), Silent())
    for i, sentence in enumerate(sentences):
        known = strings(tiny, sentence, 4)
        S = {K: known[tuple(made[K].highest[i])][1] for K in (1, 3, 6)}
        assert S[1] <= S[3] <= S[6]
        for K in (3, 6):
            assert known[tuple(made[K].drawn[i])][1] <= S[K]
            assert made[K].first[i] == made[1].first[i] == made[1].drawn[i]
    assert [made[6].highest] != [made[1].highest]


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_come_in_the_order_of_their_sources(tiny, beams):
    sentences = [[1, 2, EOS], SOURCE, [3, EOS], [2, 2, 2, 2, 3, EOS], [EOS]]
    together = Decoding(tiny, 6, 12).search(sentences, beams, Silent())
    alone = [Decoding(tiny, 6, 12).search([sentence], beams, Silent())[0] for sentence in sentences]
    assert together == alone
    assert len(set(map(tuple, alone))) > 1
    assert all(EOS not in ids[:-1] for ids in alone)
