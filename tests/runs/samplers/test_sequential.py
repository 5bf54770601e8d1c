"""Sequential Monte Carlo against exact enumeration of its own randomness.

E[Σ_i w_i 1(x_i = x) / N] = target(x), not normalised, for every string x;    hence E[Ẑ] = Z
KL(law ‖ target) ≤ log Z − E[log Ẑ],    TV(law, target) ≤ E|Ẑ/Z − 1| / 2
"""

import itertools
import math
from functools import cache, partial

import numpy as np
import pytest
import torch

from freenergy import (
    Continuations,
    NgramLM,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Truncation,
    UserError,
)
from freenergy.core.roles import Target
from freenergy.core.truncation import ANCESTRAL
from freenergy.lm.stepping import PlainStepper, Walk, ancestral, begin
from freenergy.lm.tabular import _TableStepper
from freenergy.models.residual import Residual
from freenergy.partition import log_partition
from freenergy.samplers import particles as module
from freenergy.samplers.particles import looks, run_island
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sequential import Particles, Sequential
from freenergy.testing.enumerating import branches
from freenergy.testing.networks import tiny_network

CONTEXT = Sequences.from_lists([[1]])
SHORT = {"check_every": 1, "share": 0.9}


@cache
def _normal(seed, string):
    return Rng(seed).child("string", *string).normal().item()


class Random:
    """An energy that gives every string, finished or not, a number of its own: as a twist it is as wrong as can be."""

    def __init__(self, seed=0, spread=1.0):
        self.seed, self.spread = seed, spread

    def of(self, string):
        return self.spread * _normal(self.seed, tuple(string))

    def __call__(self, x):
        return torch.tensor([[self.of(string) for string in row] for row in x.lists()], dtype=torch.float64)


class Optimal:
    """The same on finished strings, and −log E[e^{−E} | x_≤t] on the others."""

    def __init__(self, inner, lm, space):
        self.inner, self.lm, self.space = inner, lm, space

    def of(self, string):
        if len(string) == self.space.length or (string and string[-1] == self.space.eos):
            return self.inner.of(string)
        read = Sequences.from_lists([[*CONTEXT.lists()[0], *string]])
        log_p = self.lm.next_log_probs(read)[0].tolist()
        values = [log_p[v] - self.of([*string, v]) for v in range(self.lm.vocab_size)]
        return -torch.tensor(values, dtype=torch.float64).logsumexp(0).item()

    def __call__(self, x):
        return torch.tensor([[self.of(string) for string in row] for row in x.lists()], dtype=torch.float64)


def table(vocab_size=2, seed=3):
    return TabularLM.random(Rng(seed), vocab_size=vocab_size, order=2)


def target(lm, energy, space, contexts=CONTEXT):
    return Target(Residual(lm, energy), contexts, space)


def space_of(lm, length, eos=None):
    return SequenceSpace(vocab_size=lm.vocab_size, length=length, eos=eos)


def log_proposal(lm, string, truncation):
    """log q and log P_LM of one string, token by token."""
    total, base, read = 0.0, 0.0, CONTEXT.lists()[0]
    for token in string:
        log_p = lm.next_log_probs(Sequences.from_lists([read]))
        total, base = total + truncation(log_p)[0, token].item(), base + log_p[0, token].item()
        read = [*read, token]
    return total, base


def target_of(lm, energy, space, truncation=ANCESTRAL, law="model"):
    """target(x), not normalised, of every string that the proposal can draw."""
    found = {}
    for string in space.enumerate().lists():
        log_q, log_p = log_proposal(lm, string, truncation)
        if log_q > -math.inf:
            found[tuple(string)] = math.exp((log_p if law == "model" else log_q) - energy.of(string))
    return found


def by_enumeration(lm, energy, space, sampler):
    """E[Σ w 1(x)/N] of every string, the law of one emitted particle, and all (probability, Ẑ)."""
    mass, law, estimates = {}, {}, []
    for probability, found in branches(lambda rng: sampler.draw(target(lm, energy, space), rng)):
        w = found.log_weight[0].exp()
        estimates.append((probability, w.mean().item()))
        assert found.log_partition == pytest.approx(w.mean().log().item(), abs=1e-12)
        for string, weight in zip(map(tuple, found.x.lists()[0]), w.tolist(), strict=True):
            mass[string] = mass.get(string, 0.0) + probability * weight / len(w)
            law[string] = law.get(string, 0.0) + probability * weight / w.sum().item()
    return mass, law, estimates


def worst_error(mass, wanted):
    """The largest error of a string's expected weight; a string outside the target is an error too."""
    assert set(mass) <= set(wanted)
    return max(abs(mass.get(string, 0.0) - value) for string, value in wanted.items())


CASES = {
    "1 particle": (2, 3, None, Sequential(particles=1, **SHORT)),
    "2 particles": (2, 3, None, Sequential(particles=2, **SHORT)),
    "2 particles, multinomial": (2, 3, None, Sequential(particles=2, resampling="multinomial", **SHORT)),
    "3 particles": (2, 2, None, Sequential(particles=3, **SHORT)),
    "3 particles, multinomial": (2, 2, None, Sequential(particles=3, resampling="multinomial", **SHORT)),
    "2 particles with EOS": (3, 2, 0, Sequential(particles=2, **SHORT)),
    "2 particles with EOS, longer": (2, 3, 0, Sequential(particles=2, resampling="multinomial", **SHORT)),
    "3 particles with EOS": (2, 2, 0, Sequential(particles=3, **SHORT)),
    "resample in half of the cases": (2, 3, None, Sequential(particles=2, check_every=1, share=0.75)),
    "never resample": (2, 2, None, Sequential(particles=3, check_every=1, share=0.0)),
    "look at every second token": (2, 3, None, Sequential(particles=2, check_every=2, share=1.0)),
    "islands": (2, 2, None, Sequential(particles=3, batch_size=2, **SHORT)),
    "restricted to the top 2": (
        3, 2, None, Sequential(particles=2, truncation=Truncation(top_k=2), law="restricted", **SHORT)
    ),
    "model on the top 2": (3, 2, None, Sequential(particles=2, truncation=Truncation(top_k=2), **SHORT)),
    "model, tempered, with EOS": (
        2, 3, 0, Sequential(particles=2, truncation=Truncation(temperature=0.6), **SHORT)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_unbiased_whatever_the_twist(name):
    vocab_size, length, eos, sampler = CASES[name]
    lm, energy = table(vocab_size), Random()
    space = space_of(lm, length, eos)
    wanted = target_of(lm, energy, space, sampler.truncation, sampler.law)
    mass, law, estimates = by_enumeration(lm, energy, space, sampler)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert worst_error(mass, wanted) <= 1e-12
    Z = sum(wanted.values())
    assert sum(p * z for p, z in estimates) == pytest.approx(Z, abs=1e-12)
    kl = sum(p * math.log(p / (wanted[x] / Z)) for x, p in law.items())
    tv = sum(abs(law.get(x, 0.0) - value / Z) for x, value in wanted.items()) / 2
    assert -1e-12 <= kl <= math.log(Z) - sum(p * math.log(z) for p, z in estimates) + 1e-12
    assert tv <= sum(p * abs(z / Z - 1) for p, z in estimates) / 2 + 1e-12
    assert tv > 1e-3  # so that these bounds have something to bound


def weights_stay(flock, rows, is_due):
    """Mutant: particles keep their weights when others take their places."""
    log_weight = flock.log_weight
    module.__dict__["_select"](flock, rows, is_due)
    flock.log_weight = log_weight


def last_look_is_forgotten(flock, rows, is_due):
    """Mutant: w ← w · g_t without / g_s after an exchange."""
    module.__dict__["_select"](flock, rows, is_due)
    flock.log_g = torch.zeros_like(flock.log_g)


def last_look_stays_behind(flock, rows, is_due):
    """Mutant: g_s of the place and not of the ancestor."""
    log_g = flock.log_g
    module.__dict__["_select"](flock, rows, is_due)
    flock.log_g = log_g


@pytest.mark.parametrize("mutant", [weights_stay, last_look_is_forgotten, last_look_stays_behind])
def test_a_wrong_weight_is_caught(mutant, monkeypatch):
    lm, energy, sampler = table(), Random(spread=2.0), Sequential(particles=2, **SHORT)
    space = space_of(lm, 2)
    wanted = target_of(lm, energy, space)
    assert worst_error(by_enumeration(lm, energy, space, sampler)[0], wanted) <= 1e-12
    monkeypatch.setattr(module, "_select", module._Flock.select, raising=False)
    monkeypatch.setattr(module._Flock, "select", mutant)
    mass, _, estimates = by_enumeration(lm, energy, space, sampler)
    assert worst_error(mass, wanted) > 1e-2
    if mutant is not last_look_stays_behind:
        assert abs(sum(p * z for p, z in estimates) - sum(wanted.values())) > 1e-2


def test_a_model_that_does_not_follow_the_exchange_is_caught(monkeypatch):
    lm, energy, sampler = table(), Random(spread=2.0), Sequential(particles=2, **SHORT)
    space = space_of(lm, 3)
    monkeypatch.setattr(_TableStepper, "select", lambda stepper, rows: None)
    assert worst_error(by_enumeration(lm, energy, space, sampler)[0], target_of(lm, energy, space)) > 1e-3


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_the_law_of_one_result_is_that_of_a_plain_sum(share):
    """Two particles of two tokens, every choice written out: tokens, ancestors, tokens, the one that is emitted."""
    lm, energy = table(), Random(4)
    p = lm.next_log_probs(Sequences.from_lists([[1], [1, 0], [1, 1]])).exp().tolist()
    law = {}
    for a in itertools.product(range(2), repeat=2):
        w = [math.exp(-energy.of([v])) for v in a]
        is_resampled = sum(w) ** 2 / sum(v * v for v in w) < share * 2
        for i in itertools.product(range(2), repeat=2):
            chance = w[i[0]] * w[i[1]] / sum(w) ** 2 if is_resampled else float(i == (0, 1))
            for b in itertools.product(range(2), repeat=2):
                strings = [(a[i[0]], b[0]), (a[i[1]], b[1])]
                drawn = p[0][a[0]] * p[0][a[1]] * chance * p[1 + strings[0][0]][b[0]] * p[1 + strings[1][0]][b[1]]
                before = [sum(w) / 2 / w[i[0]], sum(w) / 2 / w[i[1]]] if is_resampled else [1.0, 1.0]
                last = [math.exp(-energy.of(list(x))) * old for x, old in zip(strings, before, strict=True)]
                for x, weight in zip(strings, last, strict=True):
                    law[x] = law.get(x, 0.0) + drawn * weight / sum(last)
    sampler = Sequential(particles=2, check_every=1, share=share, resampling="multinomial")
    found = {}
    for probability, sampled in branches(lambda rng: sampler(target(lm, energy, space_of(lm, 2)), 1, rng)):
        (string,) = map(tuple, sampled.x.lists()[0])
        found[string] = found.get(string, 0.0) + probability
        assert sampled.energy.item() == pytest.approx(energy.of(string), abs=1e-12)
    assert found.keys() == law.keys()
    assert max(abs(found[x] - law[x]) for x in law) <= 1e-12


def test_good_twists_come_nearer_than_none_and_bad_ones_do_not():
    """log Z − E[log Ẑ], exactly."""
    lm = table()
    space, energy = space_of(lm, 3), Random(2, spread=2.0)
    log_z = math.log(sum(target_of(lm, energy, space).values()))

    def gap(twist, share):
        _, _, found = by_enumeration(lm, twist, space, Sequential(particles=2, check_every=1, share=share))
        return log_z - sum(p * math.log(z) for p, z in found)

    best, none, random = gap(Optimal(energy, lm, space), 1.0), gap(energy, 0.0), gap(energy, 1.0)
    assert 0 < best < 0.9 * none < none < random


def test_the_best_twist_predicts_every_later_weight_on_average():
    """E[g_t / g_s | x_≤s] = 1, so all noise is in what is drawn between two looks."""
    lm = table(3)
    space = space_of(lm, 3, eos=0)
    twist = Optimal(Random(5), lm, space)
    for string in ([], [1], [2], [1, 2], [2, 2]):
        p = lm.next_log_probs(Sequences.from_lists([[1, *string]]))[0].exp().tolist()
        after = sum(p[v] * math.exp(-twist.of([*string, v])) for v in range(3))
        assert after == pytest.approx(math.exp(-twist.of(string)), rel=1e-12)
    assert math.exp(-twist.of([])) == pytest.approx(sum(target_of(lm, Random(5), space).values()), rel=1e-12)


@pytest.mark.parametrize(
    ("num", "length"),
    [(2, 2), (2, 3), (3, 2)],
)
def test_the_variance_is_estimated_without_bias(num, length):
    """E[Ẑ² · V] = Var(Ẑ), where the places of resampling are fixed and ancestors are drawn independently."""
    lm, energy = table(), Random(6)
    space = space_of(lm, length)

    def draw(rng):  # a share of 2: resample at every look
        how = {"check_every": 1, "share": 2.0, "resampling": "multinomial"}
        return run_island(target(lm, energy, space), num, rng, **how)

    first = second = told = 0.0
    for probability, island in branches(draw):
        Z = island.log_partition.exp().item()
        assert island.is_resampled.tolist() == [[True] * (length - 1) + [False]]
        V = 1 - (num / (num - 1)) ** length * (1 - 1 / island.origins.item())
        assert island.variance.item() == pytest.approx(max(V, 0.0), abs=1e-12)
        first, second, told = first + probability * Z, second + probability * Z**2, told + probability * Z**2 * V
    assert second - first**2 > 0.01
    assert told == pytest.approx(second - first**2, abs=1e-12)


def test_without_resampling_it_is_plain_resampling():
    lm, energy = table(4), Random(2)
    space = space_of(lm, 6, eos=0)
    plain = Resampling(candidates=20)(target(lm, energy, space), 3, Rng(8))
    found = Sequential(particles=20, share=0.0, check_every=2, batch_size=7).draw(
        target(lm, energy, space), Rng(8).child("draw")
    )
    assert torch.equal(found.x.tokens, plain.candidates.x.tokens)
    torch.testing.assert_close(found.log_weight, plain.candidates.log_weight, atol=1e-12, rtol=0)
    assert found.base_tokens == plain.base_tokens == int(found.x.lengths.sum())
    assert found.lengths == (2, 4, 6)
    assert [island.log_weight.shape[1] for island in found.islands] == [7, 7, 6]
    diagnostics = log_partition(plain.candidates.log_weight)
    whole = Sequential(particles=20, share=0.0).draw(target(lm, energy, space), Rng(8).child("draw"))
    assert whole.variance == pytest.approx(diagnostics.standard_error.item() ** 2, rel=1e-9)
    assert whole.log_partition == pytest.approx(diagnostics.lower.item(), abs=1e-12)


def test_islands_combine_as_independent_runs():
    lm, energy = table(4), Random(2)
    found = Sequential(particles=24, check_every=1, batch_size=8).draw(target(lm, energy, space_of(lm, 5)), Rng(3))
    each = [Particles.of([island], found.lengths) for island in found.islands]
    Z = sum(math.exp(one.log_partition) for one in each) / 3
    assert found.log_partition == pytest.approx(math.log(Z), abs=1e-12)
    variance = sum((math.exp(one.log_partition) / 3 / Z) ** 2 * one.variance for one in each)
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert found.base_tokens == 24 * 5
    assert len({tuple(one.x.tokens.flatten().tolist()) for one in each}) == 3


def test_contexts_of_a_batch_do_not_meet():
    lm, energy = table(4), Random(2)
    contexts, how = Sequences.from_lists([[1], [2], [3]]), {"check_every": 1, "share": 0.9}
    together = run_island(target(lm, energy, space_of(lm, 4), contexts), 6, Rng(3), **how)
    assert together.is_resampled.any()
    for b in range(3):
        alone = run_island(target(lm, energy, space_of(lm, 4), contexts[b : b + 1]), 6, Rng(3).shift(contexts=b), **how)
        assert torch.equal(alone.x.tokens[0], together.x.tokens[b])
        torch.testing.assert_close(alone.log_weight[0], together.log_weight[b], atol=1e-12, rtol=0)
        torch.testing.assert_close(alone.ess[0], together.ess[b], atol=1e-9, rtol=0)


class Forbidding:
    """+inf on strings that hold a token, finished or not."""

    def __init__(self, token):
        self.token = token

    def of(self, string):
        return math.inf if self.token in string else 0.3 * len(string)

    def __call__(self, x):
        return torch.tensor([[self.of(string) for string in row] for row in x.lists()], dtype=torch.float64)


def test_forbidden_strings_have_no_weight():
    lm, energy = table(3), Forbidding(2)
    space, sampler = space_of(lm, 2), Sequential(particles=2, **SHORT)
    mass, _, estimates = {}, {}, 0.0
    for probability, found in branches(lambda rng: sampler.draw(target(lm, energy, space), rng)):
        w = found.log_weight[0].exp()
        assert not w.isnan().any()
        estimates += probability * w.mean().item()
        for string, weight in zip(map(tuple, found.x.lists()[0]), w.tolist(), strict=True):
            mass[string] = mass.get(string, 0.0) + probability * weight / 2
    wanted = target_of(lm, energy, space)
    assert worst_error(mass, wanted) <= 1e-12
    assert estimates == pytest.approx(sum(wanted.values()), abs=1e-12)


def test_where_nothing_is_acceptable_it_says_so():
    lm = TabularLM(torch.tensor([[0.0, 0.0, 0.0]]).double(), eos=0)

    def never(x):
        return torch.full(x.shape, torch.inf, dtype=torch.float64)

    with pytest.raises(UserError, match=r"no particle is acceptable: all 4 have a weight of zero"):
        Sequential(particles=4, check_every=1)(target(lm, never, space_of(lm, 3)), 1, Rng(0))


def test_results_tell_their_cost_and_their_doubts():
    lm, energy = table(4), Random(2, spread=3.0)
    sampler = Sequential(particles=50, check_every=1)
    sampled = sampler(target(lm, energy, space_of(lm, 6)), 3, Rng(1))
    assert sampled.x.shape == (1, 3)
    torch.testing.assert_close(sampled.log_base, lm.log_prob(sampled.x), atol=1e-12, rtol=0)
    torch.testing.assert_close(sampled.energy, energy(sampled.x), atol=1e-12, rtol=0)
    assert sampled.base_tokens == 50 * 6
    assert sampled.is_estimated
    assert 0 < sampled.distance <= 1
    assert any("effectively descend from" in note for note in sampled.notes)
    again = sampler(target(lm, energy, space_of(lm, 6)), 3, Rng(1))
    assert torch.equal(again.x.tokens, sampled.x.tokens)
    calm = Sequential(particles=400)(target(lm, lambda x: 0.1 * energy(x), space_of(lm, 6)), 1, Rng(1))
    assert calm.notes == ()
    assert calm.distance < 0.05


def test_ended_particles_keep_their_energy():
    """All draws end at once: later looks change nothing and cost nothing."""
    lm = TabularLM(torch.tensor([[50.0, 0.0, 0.0]]).double(), eos=0)
    island = run_island(target(lm, Random(1), space_of(lm, 6, eos=0)), 5, Rng(0), check_every=1, share=1.0)
    assert island.base_tokens == 5
    assert island.x.lengths.tolist() == [[1] * 5]
    torch.testing.assert_close(island.log_weight, -Random(1)(island.x), atol=1e-12, rtol=0)
    assert island.ess.shape == (1, 6)
    assert not island.is_resampled.any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"particles": 0}, "particles is 0: set it to 1 or more"),
        ({"check_every": 0}, "check_every is 0: set it to 1 or more"),
        ({"share": 1.5}, "share is 1.5: set it to at least 0"),
        ({"share": -0.1}, "share is -0.1: set it to at least 0"),
        ({"batch_size": 0}, "batch_size is 0: set it to 1 or more"),
    ],
)
def test_settings_that_make_no_sense(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Sequential(**changes)


def test_one_context_at_a_time():
    lm = table()
    with pytest.raises(UserError, match="2 contexts were given"):
        Sequential()(target(lm, Random(), space_of(lm, 2), Sequences.from_lists([[1], [0]])), 1, Rng(0))


def test_looks_end_at_the_end():
    assert looks(40, 10) == [10, 20, 30, 40]
    assert looks(41, 10) == [10, 20, 30, 40, 41]
    assert looks(4, 10) == [4]


class Bare:
    """Someone's own language model: the role and nothing more."""

    draws_here = True

    def __init__(self, inner):
        self.inner, self.vocab_size, self.eos, self.max_length = inner, inner.vocab_size, inner.eos, inner.max_length

    def log_prob(self, x):
        return self.inner.log_prob(x)

    def next_log_probs(self, contexts):
        return self.inner.next_log_probs(contexts)

    def sample(self, *rest):
        return self.inner.sample(*rest)


def ngram():
    stream = np.array([1, 2, 3, 0, 1, 2, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0] * 3)
    return NgramLM.fit(stream, vocab_size=4, eos=0, order=3)


MODELS = {
    "table": lambda: TabularLM.random(Rng(2), vocab_size=4, order=2),
    "table, order 0": lambda: TabularLM.random(Rng(2), vocab_size=4, order=0),
    "ngram": ngram,
    "gpt2": lambda: tiny_network("GPT2"),
    "llama": lambda: tiny_network("Llama"),
    "mamba": lambda: tiny_network("Mamba"),
    "own": lambda: Bare(TabularLM.random(Rng(2), vocab_size=4, order=2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_stepper_goes_on_from_what_was_selected(name):
    """After any exchanges, log P of the next token is that of the string that stands there now."""
    lm = MODELS[name]()
    contexts = Sequences.from_lists([[1, 2, 3, 1, 2], [3], []])
    B, N, L = 3, 4, 5
    stepper, strings = begin(lm, contexts, N, L), [[[] for _ in range(N)] for _ in range(B)]
    torch.testing.assert_close(stepper.first(), lm.next_log_probs(contexts), atol=1e-5, rtol=0)
    for t in range(L - 1):
        rows = (4 * Rng(7).child(t, "rows").uniform(B, N)).long()
        stepper.select(rows)
        strings = [[list(strings[b][n]) for n in row] for b, row in enumerate(rows.tolist())]
        tokens = (4 * Rng(7).child(t, "tokens").uniform(B, N)).long()
        log_p = stepper.step(tokens)
        for b in range(B):
            for n in range(N):
                strings[b][n].append(int(tokens[b, n]))
                read = (contexts.lists()[b] or [lm.eos]) + strings[b][n]
                wanted = lm.next_log_probs(Sequences.from_lists([read]))[0]
                torch.testing.assert_close(log_p[b, n], wanted, atol=2e-5, rtol=0)


def test_the_way_of_begin():
    assert isinstance(begin(MODELS["own"](), CONTEXT, 2, 3), PlainStepper)
    assert isinstance(begin(MODELS["mamba"](), CONTEXT, 2, 3), PlainStepper)
    assert isinstance(begin(MODELS["table"](), CONTEXT, 2, 3), _TableStepper)
    lm = MODELS["gpt2"]()
    with pytest.raises(UserError, match=f"do not fit the model's context of {lm.max_length} tokens"):
        begin(lm, CONTEXT, 2, lm.max_length)


@pytest.mark.parametrize("name", ["gpt2", "ngram", "own"])
def test_walking_in_parts_is_walking_at_once(name):
    lm, contexts = MODELS[name](), Sequences.from_lists([[1, 2], [3]])
    space = space_of(lm, 5, eos=0)
    walk = Walk(begin(lm, contexts, 6, 5), contexts, 6, space, Rng(4), ANCESTRAL)
    for length in (2, 3, 5):
        walk.go_to(length)
        assert walk.x.tokens.shape == (2, 6, length)
    # an n-gram model draws whole texts by a faster way of the same law, with other numbers
    by_steps = partial(ancestral, begin(lm, contexts, 6, 5))
    wanted = (by_steps if name == "ngram" else lm.sample)(contexts, 6, space, Rng(4), ANCESTRAL)
    assert torch.equal(walk.x.tokens, wanted.x.tokens)
    assert torch.equal(walk.x.lengths, wanted.x.lengths)
    torch.testing.assert_close(walk.log_base, wanted.log_base, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "mamba", "ngram", "own"])
def test_particles_of_every_model_know_their_probability(name):
    """The base's log-probabilities survive all exchanges."""
    lm = MODELS[name]()
    space = space_of(lm, 6, eos=0)
    contexts = Sequences.from_lists([[1, 2], [3]])
    island = run_island(target(lm, Random(3), space, contexts), 12, Rng(4), check_every=1, share=0.9)
    assert island.is_resampled.sum() >= 4
    torch.testing.assert_close(island.log_base, lm.log_prob(island.x).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(island.energy, Random(3)(island.x), atol=1e-12, rtol=0)
    assert isinstance(island.x, Continuations)
    assert isinstance(lm, NgramLM) == (name == "ngram")
