"""The report on a residual model against known numbers, its bounds by enumeration, its interval by repetition."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM, Truncation, UserError
from freenergy.core.scored import Scored
from freenergy.energies.call import energies_in_batches, energies_of
from freenergy.evaluation.certified import WindowNumbers, log_probs_of_data, residual_report
from freenergy.evaluation.perplexity import Counts, measured_rate
from freenergy.partition import certified_gain, log_partition


def scores_of(energy, log_base=None, tokens=None, documents=None, log_proposal=None):
    W, n = energy.shape
    log_base = torch.full((W, n), -10.0, dtype=torch.float64) if log_base is None else log_base
    tokens = np.full(W, 4.0) if tokens is None else tokens
    counts = Counts(tokens, tokens / 2, tokens * 3, np.arange(W) if documents is None else documents)
    lengths = torch.from_numpy(tokens).long().unsqueeze(1).expand(W, n)
    x = Continuations(Sequences.from_lists([[1]] * W), torch.zeros(W, n, int(tokens.max())).long(), lengths)
    found = Scored(x=x, log_base=log_base, log_proposal=log_base, energy=energy)
    if log_proposal is not None:
        found = replace(found, log_proposal=log_proposal, law="model", truncation=Truncation(temperature=2.0))
    return found, counts


def report(energy, **others):
    scores, counts = scores_of(energy, **others)
    return residual_report(WindowNumbers.of(scores), counts)


def test_an_energy_of_zero_gains_nothing():
    found = report(torch.zeros(5, 8, dtype=torch.float64))
    assert found.nats_per_sequence.value == pytest.approx(0)
    for bound in ("lower", "upper", "certified"):
        assert found.perplexity["token"][bound].value == pytest.approx(found.base.value) == pytest.approx(math.exp(2.5))
    assert found.pair_accuracy == found.nce_accuracy == 0.5
    assert found.ess == pytest.approx(7)
    assert "no gain is shown" in found.verdict


def test_a_perfect_energy_reaches_the_ceiling_and_says_so():
    energy = torch.zeros(5, 8, dtype=torch.float64)
    energy[:, 0] = -1000
    found = report(energy)
    assert found.nats_per_sequence.value == pytest.approx(math.log(8))
    assert found.percent.value == pytest.approx(100 * (1 - 8 ** (-1 / 4)))
    assert found.percent.value == pytest.approx(found.ceiling_percent)
    assert "the most that 8 candidates can certify" in found.verdict


def test_an_energy_that_harms_is_told():
    energy = Rng(0).normal(30, 8) * 0.1
    energy[:, 0] += 3
    assert "worse than its base" in report(energy).verdict


def test_numbers_by_hand():
    energy = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
    log_base = torch.tensor([[-6.0, -1.0, -1.0], [-20.0, -2.0, -2.0]], dtype=torch.float64)
    found = report(energy, log_base=log_base, tokens=np.array([3.0, 5.0]))
    w = (-energy).exp()
    gains = (w[:, 0] / w.mean(1)).log()
    assert found.nats_per_sequence.value == pytest.approx(gains.mean().item())
    assert found.perplexity["token"]["certified"].value == pytest.approx(math.exp((26 - gains.sum().item()) / 8))
    assert found.perplexity["byte"]["certified"].value == pytest.approx(math.exp((26 - gains.sum().item()) / 24))
    optimistic = (w[:, 0] / w[:, 1:].mean(1)).log().sum().item()
    assert found.perplexity["token"]["lower"].value == pytest.approx(math.exp((26 - optimistic) / 8))
    T, loo = w[:, 1:].mean(1).log(), -energy[:, 1:].mean(1)  # with two draws each is the other's leave-one-out mean
    conservative = (-energy[:, 0] - (3 * T - 2 * loo)).sum().item()
    assert found.perplexity["token"]["upper"].value == pytest.approx(math.exp((26 - conservative) / 8))
    assert found.percent.value == pytest.approx(100 * (1 - math.exp(-gains.sum().item() / 8)))
    assert found.pair_accuracy == pytest.approx(2 / 4)
    share = w[:, 1:].amax(1) / w[:, 1:].sum(1)
    assert found.largest_share == pytest.approx(share.mean().item())
    assert found.k_hat is None  # two draws have no tail
    assert found.log_partition["lower"] == pytest.approx(T.mean().item())
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["perplexity"]["certified"] == found.perplexity["token"]["certified"].value
    assert plain["gain"]["interval"] == [found.percent.low, found.percent.high]
    assert plain["base_perplexity"] == pytest.approx(math.exp(26 / 8))


def test_one_draw_with_all_the_weight_is_no_number_and_no_crash():
    energy = torch.zeros(3, 4, dtype=torch.float64)
    energy[:, 1] = -2000
    found = report(energy)
    assert found.perplexity["token"]["upper"].value is None
    assert "one draw carries most of the weight" in found.doubt
    json.dumps(found.to_json(), allow_nan=False)


def test_an_infinite_tail_is_not_left_out_of_the_mean():
    energy = Rng(0).normal(3, 101)
    assert 0 < report(energy).k_hat < 1
    energy[1] = torch.linspace(0, 1e5, 101)
    assert report(energy).k_hat is None
    energy[1] = 0.0  # no tail at all is no tail to tell of
    assert report(energy).k_hat is not None


def test_one_document_is_told():
    energy = Rng(0).normal(30, 8)
    energy[:, 0] -= 1
    assert "the gain has no interval" in report(energy, documents=np.zeros(30, dtype=int)).verdict
    assert "the gain has no interval" not in report(energy).verdict


def test_draws_of_another_law_have_no_ceiling():
    """Under a proposal that hardly writes real text, w of that text is large: the gain passes log n, and may."""
    energy = torch.zeros(5, 8, dtype=torch.float64)
    energy[:, 0] = -9
    log_base = torch.full((5, 8), -10.0, dtype=torch.float64)
    log_proposal = log_base.clone()
    log_proposal[:, 0] += 3  # likelier to be drawn than under the base
    found = report(energy, log_base=log_base, log_proposal=log_proposal)
    assert found.nats_per_sequence.value > math.log(8)
    assert found.ceiling_percent is None
    assert "the most that" not in found.verdict


@pytest.mark.parametrize("draws", [0, 1])
def test_too_few_draws_are_refused(draws):
    with pytest.raises(UserError, match=f"with {draws} draws? per window the upper estimate of log Z is undefined"):
        report(torch.zeros(2, draws + 1, dtype=torch.float64))


def test_a_constant_changes_nothing():
    energy = Rng(0).normal(20, 16)
    found, moved = report(energy), report(energy + 1000)
    assert moved.nats_per_sequence.value == pytest.approx(found.nats_per_sequence.value, abs=1e-9)


def world():
    """All strings of two tokens over three, their base log-probabilities and energies, and the exact log Z."""
    lm = TabularLM.random(Rng(3), vocab_size=3, order=1)
    space = SequenceSpace(vocab_size=3, length=2)
    strings = space.enumerate()
    x = Continuations.from_lists([[1]], [strings.lists()])
    log_base, energy = lm.log_prob(x)[0], 1.5 * Rng(4).normal(len(strings))
    return log_base, energy, (log_base - energy).logsumexp(0)


def expected(choose, draws=2):
    """The exact expectation, over data from the joint law and draws from the base, of log P by a bound."""
    log_base, energy, log_z = world()
    log_joint = log_base - energy - log_z
    rows = [list(row) for row in itertools.product(range(len(log_base)), repeat=draws + 1)]
    index = torch.tensor(rows)
    some, _ = scores_of(energy[index], log_base=log_base[index])
    p = (log_joint[index[:, 0]] + log_base[index[:, 1:]].sum(1)).exp()
    assert p.sum().item() == pytest.approx(1)
    log_p = choose(some)
    total = (p * log_p).sum().item()
    return total, (log_joint.exp() * log_joint).sum().item()


@pytest.mark.parametrize("draws", [2, 3])
def test_bounds_enclose_the_exact_log_likelihood_in_expectation(draws):
    """By enumeration of all data and all draws: lower perplexity ≤ exact ≤ certified. A mutant forgets the datum."""

    def by(name):
        return lambda some: log_probs_of_data(some, log_partition(some.log_weight[:, 1:]))[name]

    optimistic, exact = expected(by("lower"), draws)
    certified, _ = expected(by("certified"), draws)
    assert certified < exact - 0.01
    assert optimistic > exact + 0.01

    def without_the_datum(some):
        return some.log_score[:, 0] - some.log_weight[:, 1:].logsumexp(1) + math.log(draws)

    assert expected(without_the_datum, draws)[0] > exact


@pytest.mark.statistical
def test_the_interval_of_the_gain_covers_as_often_as_it_says():
    """Windows in documents that are alike; 95 % ± 5 standard errors of 1,000 repeats (false-failure rate 6e-7).

    The mutant takes every window for a document of its own, and covers far less often.
    """
    n, repeats = 4, 1000

    def gain(energy, documents):
        g = certified_gain(energy[:, :1], energy[:, 1:]).numpy()
        return measured_rate(np.bincount(documents, g), np.bincount(documents).astype(float))

    def trial(rng, by_document):
        ease = np.repeat(rng.normal(0, 1.0, 30), 4)
        energy = torch.from_numpy(rng.normal(0, 1, (120, n)))
        energy[:, 0] -= torch.from_numpy(ease)
        return gain(energy, np.repeat(np.arange(30), 4) if by_document else np.arange(120))

    energy = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (120, n)))
    documents = np.repeat(np.arange(30), 4)
    found = report(energy, documents=documents).nats_per_sequence.to_json()
    assert found == pytest.approx(gain(energy, documents).to_json(), abs=1e-12)  # what is repeated is what is reported
    large = np.random.default_rng(1)
    energy = torch.from_numpy(large.normal(0, 1, (2_000_000, n)))
    energy[:, 0] -= torch.from_numpy(large.normal(0, 1, 2_000_000))
    truth = gain(energy, np.zeros(2_000_000, dtype=int)).value
    covers = [
        np.mean([m.low <= truth <= m.high for m in (trial(np.random.default_rng(s), kind) for s in range(repeats))])
        for kind in (True, False)
    ]
    allowed = 5 * math.sqrt(0.95 * 0.05 / repeats)
    assert abs(covers[0] - 0.95) < allowed
    assert covers[1] < 0.95 - allowed


class Broken:
    def __init__(self, change):
        self.change = change

    def __call__(self, x):
        return self.change(torch.zeros(x.shape))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda E: E[:, :1], r"Broken returned shape \(2, 1\) for 2 contexts with 3 continuations each in the batch"),
        (lambda E: E.tolist(), "Broken returned a list"),
        (lambda E: E.index_fill(1, torch.tensor([2]), math.nan), "returned nan for continuation 2 of context 0 in the"),
    ],
)
def test_a_broken_energy_is_named_with_its_batch(change, words):
    lm = TabularLM.random(Rng(0), vocab_size=3, order=1)
    x = Continuations.from_lists([[1], [2]], [[[1, 2]] * 3] * 2)
    with pytest.raises(UserError, match=words):
        energies_of(Broken(change), x, where="the batch of step 7")
    assert energies_of(Broken(lambda E: E), x).shape == lm.log_prob(x).shape


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_parts_change_nothing(rows):
    lm = TabularLM.random(Rng(0), vocab_size=3, order=1)
    space = SequenceSpace(vocab_size=3, length=3)
    x = Continuations.from_lists([[1], [2], []], [[[1]], [[2]], [[0]]])
    x = lm.sample(x.contexts, 4, space, Rng(1)).x
    assert torch.equal(energies_in_batches(lm.log_prob, x, batch_size=rows), lm.log_prob(x))
