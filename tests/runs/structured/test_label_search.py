"""Prefix beam search against exhaustive search; the transducer against the list of all its label sequences."""

import itertools

import numpy as np
import pytest
import torch

from freenergy import Rng, TabularLM, UserError
from freenergy.lm.ngram import NgramLM
from freenergy.structured import (
    AutomatonScorer,
    LabelAutomaton,
    LanguageModelScorer,
    PrefixBeam,
    greedy,
    padded_labels,
    rnnt_log_prob,
)  # fmt: skip
from freenergy.testing import enumerate_ctc

INF = float("inf")


def numbers(*shape, seed=0):
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def automaton(V=2, order=2):
    stream = np.append(np.random.default_rng(1).integers(0, V + 1, 40), 0)
    return LabelAutomaton.from_ngram(NgramLM.fit(stream, vocab_size=V + 1, eos=0, order=order))


def exhaustive(x, log_p):
    """Every label sequence with its score, best first."""
    scores = enumerate_ctc(x, lambda y: 0.0).log_scores()
    fused = {y: score.item() + log_p(y) for y, score in scores.items()}
    return sorted(((y, s) for y, s in fused.items() if s > -INF), key=lambda pair: -pair[1])


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_is_exhaustive_search(seed):
    """With an n-gram of labels, a language model of tokens, a lexicon, weights and a bonus."""
    x, ngram = numbers(5, 3, seed=seed), automaton()
    lm = TabularLM.random(Rng(seed), vocab_size=3, order=2)
    lexicon = LabelAutomaton.from_lexicon([[1, 2], [2], [1, 1]], 2)
    by_lm = LanguageModelScorer(lm, [0, 1, 2])

    def of_lm(y):
        state, total = by_lm.start(), 0.0
        for v in y:
            state, log_p = by_lm.step(state, v)
            total += log_p
        return total + by_lm.end(state)

    cases = [
        ((), lambda y: 0.3 * len(y)),
        ((AutomatonScorer(ngram),), lambda y: 0.7 * ngram.log_score(y) + 0.3 * len(y)),
        ((AutomatonScorer(lexicon), by_lm), lambda y: lexicon.log_score(y) + 0.7 * of_lm(y) + 0.3 * len(y)),
    ]
    for scorers, log_p in cases:
        weights = (1.0, 0.7)[2 - len(scorers) :]
        found = PrefixBeam(beam=500, bonus=0.3, weights=weights)(x, scorers, k=500)
        expected = exhaustive(x, log_p)
        assert [each.labels for each in found] == [y for y, _ in expected]
        assert all(abs(each.score - s) < 1e-11 for each, (_, s) in zip(found, expected, strict=True))


def test_a_narrow_beam_finds_no_better_and_its_scores_count_all_paths():
    x, ngram = numbers(6, 3, seed=9), automaton()
    best = exhaustive(x, ngram.log_score)
    scores = dict(best)
    found = PrefixBeam(beam=3)(x, [AutomatonScorer(ngram)], k=3)
    assert all(abs(each.score - scores[each.labels]) < 1e-11 for each in found)
    assert found[0].score <= best[0][1] + 1e-12
    assert abs(found[0].score - found[0].log_frames - found[0].log_scorers[0]) < 1e-12


def test_language_model_scores_equal_its_log_prob():
    from freenergy import Continuations

    lm = TabularLM.random(Rng(3), vocab_size=3, order=2)
    found = PrefixBeam(beam=50)(numbers(4, 3, seed=2), [LanguageModelScorer(lm, [0, 1, 2])], k=10)
    for each in found:
        x = Continuations.from_lists([[]], [[[*each.labels, 0]]])
        assert each.log_scorers[0] == pytest.approx(lm.log_prob(x).item(), abs=1e-12)


def test_forbidden_and_bad_arguments():
    nothing = LabelAutomaton.from_lexicon([[1] * 9], 2)  # needs more frames than there are
    assert PrefixBeam()(numbers(4, 3), [AutomatonScorer(nothing)]) == []
    with pytest.raises(UserError, match="widen the beam"):
        PrefixBeam(beam=2)(numbers(4, 3), k=3)
    with pytest.raises(UserError, match="give one for each"):
        PrefixBeam(weights=(1.0, 2.0))(numbers(4, 3))
    with pytest.raises(UserError, match="beam"):
        PrefixBeam(beam=0)


def test_greedy_merges_repeats_first():
    symbols = torch.tensor([[0, 3, 3, 0, 3, 1, 1, 0]])
    x = torch.nn.functional.one_hot(symbols, 4).double()
    assert greedy(x) == [[3, 3, 1]]
    assert greedy(x, torch.tensor([4])) == [[3]]


def _step_law(t, prefix, V, longest):
    """A law of the next symbol that depends on the frame and on all labels so far; no label after the longest."""
    logits = numbers(V + 1, seed=hash((t, prefix)) % 10_000)
    if len(prefix) == longest:
        logits[1:] = -INF
    return logits.log_softmax(0)


def _lattice(y, T, V, longest):
    return torch.stack([torch.stack([_step_law(t, y[:u], V, longest) for u in range(len(y) + 1)]) for t in range(T)])


def _by_paths(table, y):
    """Sum over all orders of T blanks and U labels that end with a blank."""
    T, U, total = len(table), len(y), 0.0
    for places in itertools.combinations(range(T + U - 1), U):
        t = u = 0
        log_p = 0.0
        for j in range(T + U):
            if j in places:
                log_p += table[t, u, y[u]].item()
                u += 1
            else:
                log_p += table[t, u, 0].item()
                t += 1
        total += np.exp(log_p)
    return total


def test_the_transducer_sums_to_one_over_all_label_sequences():
    T, V, longest = 3, 2, 4
    total = 0.0
    for length in range(longest + 1):
        for y in itertools.product(range(1, V + 1), repeat=length):
            table = _lattice(y, T, V, longest)
            p = rnnt_log_prob(table[None], padded_labels([y])).exp().item()
            assert p == pytest.approx(_by_paths(table, y), abs=1e-14)
            total += p
    assert total == pytest.approx(1.0, abs=1e-12)


def test_gradients_of_the_transducer_and_padding():
    x = numbers(3, 4, 3, 3, seed=1).requires_grad_()
    y, lengths = torch.tensor([[1, 2], [2, -1], [-1, -1]]), torch.tensor([4, 3, 2])

    def log_prob(x):
        return rnnt_log_prob(x.log_softmax(-1), y, lengths)

    assert torch.autograd.gradcheck(log_prob, (x,))
    assert torch.autograd.gradgradcheck(log_prob, (x,))
    alone = rnnt_log_prob(x[1:2, :3, :2].log_softmax(-1), y[1:2, :1])
    assert abs((alone[0] - log_prob(x)[1]).item()) < 1e-12
    moved = torch.where(torch.arange(3).view(1, 1, 3, 1) <= (y >= 0).sum(1).view(3, 1, 1, 1), x, 7.0)
    assert (log_prob(moved) - log_prob(x)).abs().max() < 1e-12


def test_impossible_and_bad_labels_of_the_transducer():
    x = numbers(2, 3, 2, 3).log_softmax(-1).requires_grad_()
    found = rnnt_log_prob(x, torch.tensor([[1], [-1]]), torch.tensor([0, 0]))
    assert found.tolist() == [-INF, 0.0]
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert (grad == 0).all()
    closed = torch.where(torch.arange(3) == 1, -INF, x)  # label 1 never happens
    log_p = rnnt_log_prob(closed, torch.tensor([[1], [2]]))
    assert log_p[0] == -INF
    (grad,) = torch.autograd.grad(log_p.sum(), x)
    assert not grad.isnan().any()
    assert (grad[0] == 0).all()
    with pytest.raises(UserError, match="not in the alphabet"):
        rnnt_log_prob(x, torch.tensor([[3], [1]]))
    with pytest.raises(UserError, match="give \\[2, 1\\]"):
        rnnt_log_prob(x, torch.tensor([[1, 1], [1, 1]]))
