"""Perplexity of a residual model with fresh draws: references, tempered proposals, curve, densities, positions."""

import math

import numpy as np
import pytest
import torch

from freenergy import Continuations, Residual, Rng, Sequences, SequenceSpace, TabularLM, Truncation, UserError
from freenergy.core.files import read_tensors
from freenergy.core.progress import Silent
from freenergy.core.scored import Scored
from freenergy.evaluation.certified import WindowNumbers, residual_report
from freenergy.evaluation.figure_numbers import curve_numbers, densities, density_numbers, draws_curve, steps
from freenergy.evaluation.perplexity import Counts
from freenergy.evaluation.positions import by_position, position_path
from freenergy.evaluation.residual_perplexity import residual_perplexity
from freenergy.lm.token_log_probs import log_proposal
from freenergy.partition import log_partition, step_log_probs

V, L = 3, 3
SPACE = SequenceSpace(vocab_size=V, length=L)


class Table:
    """An energy of its own for every string."""

    def __init__(self, spread=1.0):
        self.values = spread * Rng(11).normal(V**L)

    def __call__(self, x):
        return self.values[(x.tokens * torch.tensor([V**2, V, 1])).sum(-1)]


@pytest.fixture(scope="module")
def joint():
    return Residual(TabularLM.random(Rng(2), vocab_size=V, order=1), Table())


def every(context=1):
    return Continuations.from_lists([[context]], [SPACE.enumerate().lists()])


def exact_log_z(joint, context=1):
    return joint.log_score(every(context)).logsumexp(1).item()


WINDOWS = Continuations.from_lists([[1], [2], [1], [0]], [[[0, 1, 2]], [[2, 2, 1]], [[1, 1, 1]], [[0, 0, 2]]])


def test_numbers_from_the_same_draws(joint):
    found = residual_perplexity(joint, WINDOWS, 6, SPACE, Rng(5))
    log_p, tokens = {"lower": 0.0, "certified": 0.0}, 4 * L
    for b in range(4):
        draws = joint.base.sample(WINDOWS.contexts[b : b + 1], 6, SPACE, Rng(5).shift(contexts=b))
        w = (-joint.energy(draws.x)[0]).exp()
        own = joint.scored(WINDOWS[b : b + 1])
        mine = (-own.energy[0, 0]).exp()
        score = own.log_score[0, 0].item()
        log_p["lower"] += score - math.log(w.mean())
        log_p["certified"] += score - math.log((mine + w.sum()) / 7)
    for name, value in log_p.items():
        assert found.perplexity["token"][name].value == pytest.approx(math.exp(-value / tokens))
    assert found.draws == 6
    assert found.perplexity["word"]["lower"].value is None  # without a tokenizer nothing is known of words


def test_with_many_draws_the_exact_perplexity_lies_between(joint):
    found = residual_perplexity(joint, WINDOWS, 3000, SPACE, Rng(6))
    exact = sum(
        joint.log_score(WINDOWS[b : b + 1])[0, 0].item() - exact_log_z(joint, int(WINDOWS.contexts.tokens[b, 0]))
        for b in range(4)
    )
    perplexity = math.exp(-exact / (4 * L))
    for bound in ("lower", "upper", "certified"):
        assert found.perplexity["token"][bound].value == pytest.approx(perplexity, rel=0.02)


def test_a_tempered_proposal_has_weights_of_its_own(joint):
    """log q of given text sums to one and is that of the sampler; with it Z is Z, without it another number."""
    hot = Truncation(temperature=4.0)
    x = every()
    strings = [Continuations(x.contexts, x.tokens[:, i : i + 1], x.lengths[:, i : i + 1]) for i in range(V**L)]
    log_q = torch.cat([log_proposal(joint.base, one, hot) for one in strings])
    assert log_q.exp().sum().item() == pytest.approx(1)
    draws = joint.base.sample(x.contexts, 5, SPACE, Rng(1), hot)
    for i in range(5):
        torch.testing.assert_close(
            log_proposal(joint.base, draws.x.candidates(slice(i, i + 1)), hot)[0, 0], draws.log_proposal[0, i]
        )
    one = WINDOWS[0:1]
    found = residual_perplexity(joint, one, 4000, SPACE, Rng(3), truncation=hot)
    estimate, error = found.log_partition["lower"], found.log_partition["standard_error"]
    exact = exact_log_z(joint)
    assert abs(estimate - exact) < 5 * error  # false-failure rate 6e-7
    draws = joint.base.sample(one.contexts, 4000, SPACE, Rng(3), hot)
    unweighted = log_partition(-joint.energy(draws.x)).lower.item()
    assert abs(unweighted - exact) > 5 * error


@pytest.mark.parametrize("truncation", [Truncation(top_k=2), Truncation(top_p=0.9)])
def test_a_truncated_proposal_certifies_nothing(joint, truncation):
    with pytest.raises(UserError, match="gives real text probability zero, so nothing can be certified"):
        residual_perplexity(joint, WINDOWS, 4, SPACE, Rng(0), truncation=truncation)


@pytest.mark.parametrize("draws", [0, 1])
def test_too_few_draws(joint, draws):
    with pytest.raises(UserError, match="the upper estimate of log Z is undefined"):
        residual_perplexity(joint, WINDOWS, draws, SPACE, Rng(0))


def test_documents_may_have_any_numbers(joint):
    by_number = [
        residual_perplexity(joint, WINDOWS, 6, SPACE, Rng(5), documents=np.array(numbers))
        for numbers in ([0, 0, 1, 1], [70, 70, 900, 900])
    ]
    assert by_number[0] == by_number[1]
    assert by_number[0].documents == 2
    with pytest.raises(UserError, match="3 numbers of documents for 4 windows"):
        residual_perplexity(joint, WINDOWS, 6, SPACE, Rng(5), documents=np.arange(3))


def test_texts_that_z_does_not_sum_over_are_refused(joint):
    short = Continuations.from_lists([[1], [1]], [[[0, 1, 2]], [[0, 1]]])
    with pytest.raises(UserError, match="a continuation of 2 tokens is not in a space of 3"):
        residual_perplexity(joint, short, 6, SPACE, Rng(5))


def scores(W=6, n=9):
    energy, log_base = Rng(1).normal(W, n), -5 - Rng(2).normal(W, n).abs()
    x = Continuations(Sequences.from_lists([[1]] * W), torch.zeros(W, n, 5).long(), torch.full((W, n), 5))
    tokens = np.full(W, 5.0)
    counts = Counts(tokens, tokens, tokens, np.arange(W) // 2)
    return Scored(x=x, log_base=log_base, log_proposal=log_base, energy=energy), counts


def test_the_curve_over_draws():
    some, counts = scores()
    rows = draws_curve(curve_numbers(some), some.log_base[:, 0], counts, some.num - 1)
    assert [row["draws"] for row in rows] == steps(8) == [2, 4, 8]
    last = residual_report(WindowNumbers.of(some), counts)
    for bound in ("lower", "upper", "certified"):
        assert rows[-1][bound] == pytest.approx(last.perplexity["token"][bound].value)
    score = some.log_score[:, 0]
    halves = [some.log_weight[:, 1:5], some.log_weight[:, 5:9]]
    log_p = score - sum(half.logsumexp(1) - math.log(4) for half in halves) / 2
    assert rows[1]["lower"] == pytest.approx(math.exp(-log_p.sum().item() / 30))
    own = some.log_weight[:, :1]
    log_p = score - sum(torch.cat([own, half], 1).logsumexp(1) - math.log(5) for half in halves) / 2
    assert rows[1]["certified"] == pytest.approx(math.exp(-log_p.sum().item() / 30))
    assert all(row["base"] == rows[0]["base"] for row in rows)


def test_densities_by_hand():
    some, counts = scores()
    chosen = {"base": torch.tensor([1, 2, 3, 4, 5, 6]), "joint": torch.tensor([8, 7, 6, 5, 4, 3])}
    Z = log_partition(some.log_weight[:, 1:])
    found, log_z = densities(density_numbers(some, Z, chosen), counts), Z.jackknife
    for w in range(6):
        i = int(chosen["joint"][w])
        assert found["base"]["joint"][w] == pytest.approx(some.log_base[w, i].item() / 5)
        assert found["joint"]["joint"][w] == pytest.approx((some.log_score[w, i] - log_z[w]).item() / 5)
        assert found["joint"]["human"][w] == pytest.approx((some.log_score[w, 0] - log_z[w]).item() / 5)
    apart = np.array(found["base"]["human"]) - np.array(found["base"]["base"])
    value, low, high = found["difference_of_means"]["base"]["base"]
    assert value == pytest.approx(apart.mean())
    means = apart.reshape(3, 2).mean(1)  # three documents of two windows: a plain t interval of their means
    reach = 4.302652729911275 * means.std(ddof=1) / math.sqrt(3)
    assert [low, high] == pytest.approx([value - reach, value + reach])


def test_gain_by_position_is_that_of_the_exact_conditionals(joint, tmp_path):
    """With very many completions each step is near its exact value; a second call reads what the first has kept."""
    documents = np.arange(4)
    arguments = (joint, WINDOWS, documents, SPACE, 2000, tmp_path, Rng(0), Silent())
    rows = by_position(*arguments)
    assert [row["position"] for row in rows] == [1, 2, 3]
    kept = sorted((tmp_path / "positions").iterdir())
    assert len(kept) == 4
    log_z = {}
    for t in range(3):
        exact, base = [], []
        for b in range(4):
            context, x = WINDOWS.contexts.lists()[b], WINDOWS.lists()[b][0]
            log_score = joint.log_score(Continuations.from_lists([context], [SPACE.enumerate().lists()]))[0]
            strings = SPACE.enumerate().lists()
            for k in (t, t + 1):
                keep = torch.tensor([s[:k] == x[:k] for s in strings])
                log_z[k] = log_score[keep].logsumexp(0).item()
            exact.append(log_z[t + 1] - log_z[t])
            base.append(
                joint.base.next_log_probs(Continuations.from_lists([context + x[:t]], [[[]]]).contexts)[0, x[t]]
            )
        assert rows[t]["base"] == pytest.approx(math.exp(-np.mean(base)))
        assert rows[t]["joint"] == pytest.approx(math.exp(-np.mean(exact)), rel=0.05)
        gain = 100 * (1 - math.exp(np.mean(base) - np.mean(exact)))
        assert rows[t]["gain_percent"] == pytest.approx(gain, abs=5)
    total = sum(math.log(row["joint"]) for row in rows)
    wrong = sum(math.log(row["base"]) for row in rows)
    exact = -np.mean(
        [
            joint.log_score(WINDOWS[b : b + 1])[0, 0].item() - exact_log_z(joint, int(WINDOWS.contexts.tokens[b, 0]))
            for b in range(4)
        ]
    )
    assert total == pytest.approx(exact, abs=0.05)  # the steps add up to the sequence
    assert abs(wrong - exact) > 0.1
    stamps = [path.stat().st_mtime_ns for path in kept]
    assert by_position(*arguments) == rows
    assert [path.stat().st_mtime_ns for path in kept] == stamps


def test_positions_keep_the_estimate_and_not_a_bound(joint, tmp_path):
    by_position(joint, WINDOWS, np.arange(4), SPACE, 4, tmp_path, Rng(0), Silent())
    for b in range(4):
        kept = read_tensors(position_path(tmp_path, b))
        found = step_log_probs(joint, WINDOWS[b : b + 1], SPACE, Rng(0).child(b), draws=4)
        assert torch.equal(kept["joint"], found.estimate[0])
        assert torch.equal(kept["base"], found.log_base[0])
        assert (found.estimate - found.lower).max() > 1e-3
