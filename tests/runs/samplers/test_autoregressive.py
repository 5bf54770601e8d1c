"""Token by token: the law of what is written, by walking every branch; its bound; the books on what it costs."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.core.roles import Target
from freenergy.core.truncation import Truncation
from freenergy.models.residual import Residual
from freenergy.samplers.autoregressive import Autoregressive, step_distance
from freenergy.samplers.sampled import Sampler
from freenergy.testing.enumerating import law

V = 3
BASE = TabularLM.random(Rng(1), vocab_size=V, order=1)
CONTEXT = Sequences.from_lists([[2]])
both_laws = pytest.mark.parametrize("law_", ["restricted", "model"])
small_cases = pytest.mark.parametrize(("length", "completions"), [(2, 1), (2, 2)], ids=str)
both_spaces = pytest.mark.parametrize("eos", [0, None], ids=["ended", "fixed"])


class Lookup:
    """One number a string of at most three tokens."""

    def __init__(self, spread=1.0, seed=3):
        self.values = spread * Rng(seed).normal(V**3 * 4)

    def __call__(self, x: Continuations) -> torch.Tensor:
        tokens = torch.nn.functional.pad(x.tokens * x.mask, (0, 3 - x.tokens.shape[2]))
        return self.values[(tokens * V ** torch.arange(3)).sum(-1) * 4 + x.lengths]


ENERGY = Lookup()


class World:
    """Plain sums over strings: the proposal, its endings, the target, and the law of the sampler."""

    def __init__(self, space, top_k, law_):
        self.space, self.top_k, self.law = space, top_k, law_

    def steps(self, head):
        """(q, P_LM) of every token that the proposal can draw after the head."""
        p = BASE.next_log_probs(Sequences.from_lists([CONTEXT.lists()[0] + list(head)]))[0].exp().tolist()
        top = sorted(range(V), key=lambda v: -p[v])[: self.top_k]
        total = sum(p[v] for v in top)
        return {v: (p[v] / total, p[v]) for v in top}

    def is_done(self, x):
        return len(x) == self.space.length or (x[-1:] == (self.space.eos,) and self.space.eos is not None)

    def endings(self, head):
        """Every finished text that begins with the head: (q, P_LM) of what follows the head."""
        if self.is_done(head):
            return {head: (1.0, 1.0)}
        found = {}
        for v, (q, p) in self.steps(head).items():
            for x, (q_rest, p_rest) in self.endings((*head, v)).items():
                found[x] = (q * q_rest, p * p_rest)
        return found

    def weight(self, x, q, p):
        E = ENERGY(Continuations.from_lists(CONTEXT.lists(), [[x]])).item()
        return math.exp(-E) * (p / q if self.law == "model" else 1.0)

    def weights_after(self, head, v):
        """The law of w over endings of head + v: pairs (probability, w); the token's own P_LM/q is in w."""
        q, p = self.steps(head)[v]
        rest = self.endings((*head, v))
        return [(q_rest, self.weight(x, q * q_rest, p * p_rest)) for x, (q_rest, p_rest) in rest.items()]

    def exact(self):
        """P(x) of the target."""
        score = {x: q * self.weight(x, q, p) for x, (q, p) in self.endings(()).items()}
        return {x: value / sum(score.values()) for x, value in score.items()}

    def step_law(self, head, m):
        """E[â_v / Σ â_u] over all tuples of m completions of each token."""
        steps = self.steps(head)
        laws = [self.weights_after(head, v) for v in steps]
        found = dict.fromkeys(steps, 0.0)
        for drawn in itertools.product(*(itertools.product(law_of, repeat=m) for law_of in laws)):
            chance = math.prod(p for group in drawn for p, _ in group)
            a = [q * sum(w for _, w in group) / m for (q, _), group in zip(steps.values(), drawn, strict=True)]
            for v, value in zip(steps, a, strict=True):
                found[v] += chance * value / sum(a)
        return found

    def emitted(self, m, head=(), chance=1.0):
        if self.is_done(head):
            return {head: chance}
        found = {}
        for v, p in self.step_law(head, m).items():
            found |= self.emitted(m, (*head, v), chance * p)
        return found

    def step_bound(self, head, m):
        """The docstring's bound on TV(step), with the law of w itself."""
        steps = self.steps(head)
        a = {v: q * sum(p * w for p, w in self.weights_after(head, v)) for v, (q, _) in steps.items()}
        total, bound = sum(a.values()), 0.0
        for v, (q, _) in steps.items():
            P = a[v] / total
            y = [(p, q * w / total) for p, w in self.weights_after(head, v)]
            bound += max(0.0, P - sum(p * value / (1 + (value - P) / m) for p, value in y))
        exact = self.step_law(head, m)
        return bound, sum(abs(exact[v] - a[v] / total) for v in steps) / 2

    def bound(self, m, head=(), chance=1.0):
        """Σ_t E[bound on TV(step t)] over what is written."""
        if self.is_done(head):
            return 0.0
        own = chance * self.step_bound(head, m)[0]
        return own + sum(self.bound(m, (*head, v), chance * p) for v, p in self.step_law(head, m).items())


def distance(p, q):
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in {*p, *q}) / 2


def target(space, energy=ENERGY, contexts=CONTEXT):
    return Target(Residual(BASE, energy), contexts, space)


def emitted(sampler, space):
    """The law of one text, over every branch of the sampler."""
    return law(lambda rng: sampler(target(space), 1, rng), lambda sampled: tuple(sampled.x.lists()[0][0]))


@both_laws
@both_spaces
@small_cases
def test_the_law_is_the_product_of_mean_ratios(law_, eos, length, completions):
    space = SequenceSpace(vocab_size=V, length=length, eos=eos)
    found = emitted(Autoregressive(top_k=2, completions=completions, law=law_), space)
    world = World(space, 2, law_)
    wanted = world.emitted(completions)
    assert set(found) == set(wanted)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    # mutants: the base's own law, and the target itself, which finitely many completions do not reach
    assert distance(found, {x: q for x, (q, _) in world.endings(()).items()}) > 0.01
    assert distance(found, world.exact()) > 1e-4


def test_the_law_of_three_tokens():
    space = SequenceSpace(vocab_size=V, length=3, eos=0)
    found = emitted(Autoregressive(top_k=2, completions=1), space)
    assert found == pytest.approx(World(space, 2, "restricted").emitted(1), abs=1e-12)


@both_spaces
def test_the_two_targets_are_different(eos):
    space = SequenceSpace(vocab_size=V, length=2, eos=eos)
    assert distance(World(space, 2, "model").exact(), World(space, 2, "restricted").exact()) > 0.01
    assert distance(World(space, V, "model").exact(), World(space, V, "restricted").exact()) < 1e-12
    strings = space.enumerate()
    x = Continuations(CONTEXT, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    joint = (BASE.log_prob(x) - ENERGY(x))[0].softmax(0).tolist()
    whole = dict(zip(map(tuple, strings.lists()), joint, strict=True))
    assert World(space, V, "restricted").exact() == pytest.approx(whole, abs=1e-12)


@both_laws
def test_one_token_is_exact(law_):
    space, sampler = SequenceSpace(vocab_size=V, length=1), Autoregressive(top_k=2, completions=5, law=law_)
    found = emitted(sampler, space)
    assert found == pytest.approx(World(space, 2, law_).exact(), abs=1e-12)
    sampled = sampler(target(space), 1, Rng(0))
    assert (sampled.distance, sampled.base_tokens) == (0.0, 0)


@both_laws
@both_spaces
def test_the_bound_is_above_the_distance_and_falls_as_one_over_m(law_, eos):
    world = World(SequenceSpace(vocab_size=V, length=2, eos=eos), 2, law_)
    for m in (1, 2, 3, 4):
        bound, exact = world.step_bound((), m)
        assert exact <= bound + 1e-12
        assert distance(world.emitted(m), world.exact()) <= world.bound(m) + 1e-12
    first, second = (world.bound(m) for m in (3, 6))
    assert first / second == pytest.approx(2, rel=0.25)
    assert world.bound(3) < 1  # it says something


def test_the_estimated_bound_is_that_of_the_draws():
    """With completions that are the whole law of w, each as often as it comes, estimate and bound are the same."""
    q, w = [0.7, 0.3], [[1.0, 1.0, 4.0], [0.5, 2.0, 2.0]]
    log_a = torch.tensor([[math.log(p * value) for value in row] for p, row in zip(q, w, strict=True)])
    a = [p * sum(row) / 3 for p, row in zip(q, w, strict=True)]
    wanted = 0.0
    for p, row, mean in zip(q, w, a, strict=True):
        P = mean / sum(a)
        y = [p * value / sum(a) for value in row]
        wanted += P - sum(value / (1 + (value - P) / 3) for value in y) / 3
    assert step_distance(log_a) == pytest.approx(wanted, abs=1e-6)
    assert wanted > 0.01
    assert step_distance(torch.zeros(1, 3)) == 0.0  # one token is no choice


def test_many_completions_come_to_the_target():
    space = SequenceSpace(vocab_size=V, length=2)
    few, many = (Autoregressive(completions=m)(target(space), 8, Rng(2)) for m in (4, 200))
    assert many.distance < few.distance / 10
    assert few.is_estimated
    assert many.is_estimated
    one = Autoregressive(completions=1)(target(space), 1, Rng(2))
    assert one.distance == 1.0  # one completion tells nothing


@both_spaces
def test_the_books_are_right(eos):
    space = SequenceSpace(vocab_size=V, length=3, eos=eos)
    sampler = Autoregressive(top_k=2, completions=3)
    sampled = sampler(target(space), 5, Rng(7))
    assert isinstance(sampler, Sampler)
    assert sampled.x.shape == (1, 5)
    assert len({tuple(x) for x in sampled.x.lists()[0]}) > 1  # each has draws of its own
    torch.testing.assert_close(sampled.log_base, BASE.log_prob(sampled.x), atol=1e-12, rtol=0)
    torch.testing.assert_close(sampled.energy, ENERGY(sampled.x), atol=1e-12, rtol=0)
    assert (sampled.method, sampled.law) == ("autoregressive", "restricted")
    if eos is None:
        assert sampled.base_tokens == sampler.cost(space, 5) == 5 * 2 * 3 * (2 + 1)
    else:
        assert 0 < sampled.base_tokens < sampler.cost(space, 5)


def test_uneven_weights_are_reported():
    space = SequenceSpace(vocab_size=V, length=3)
    assert Autoregressive(completions=50)(target(space, Lookup(0.1)), 1, Rng(1)).notes == ()
    notes = Autoregressive(completions=2)(target(space, Lookup(20.0)), 9, Rng(1)).notes
    assert len(notes) == 1
    assert "one completion carries most of the weight" in notes[0]


def test_it_says_that_it_is_expensive_and_reports_progress():
    class Listener:
        def __init__(self):
            self.said, self.done, self.total = [], 0, None

        @contextmanager
        def track(self, label, total=None, unit=""):
            self.total = total

            def advance(amount, note=""):
                self.done += amount

            yield advance

        def say(self, message):
            self.said.append(message)

    listener = Listener()
    space = SequenceSpace(vocab_size=V, length=3)
    Autoregressive(top_k=2, completions=100)(target(space), 2, Rng(1), listener)
    assert listener.said == [
        "token by token takes up to 1,200 tokens of the base, as many as resampling among 200 candidates"
    ]
    assert listener.done == listener.total == 6


def test_bad_requests_are_refused():
    for name in ("top_k", "completions", "batch_size"):
        with pytest.raises(UserError, match=f"{name} is 0"):
            Autoregressive(**{name: 0})
    space = SequenceSpace(vocab_size=V, length=2)

    def forbids(x: Continuations) -> torch.Tensor:
        return torch.full(x.shape, math.inf)

    with pytest.raises(UserError, match="no candidate is acceptable"):
        Autoregressive()(target(space, forbids), 1, Rng(0))

    def broken(x: Continuations) -> torch.Tensor:
        return torch.full(x.shape, math.nan)

    with pytest.raises(UserError, match="returned nan"):
        Autoregressive()(target(space, broken), 1, Rng(0))


def test_forbidden_tokens_are_not_written():
    likely = int(BASE.next_log_probs(CONTEXT).argmax())

    def forbids(x: Continuations) -> torch.Tensor:
        return torch.where((x.tokens == likely).any(-1), math.inf, 0.0)

    space = SequenceSpace(vocab_size=V, length=2)
    sampled = Autoregressive(completions=50)(target(space, forbids), 20, Rng(0))
    assert likely not in sampled.x.tokens
    assert sampled.energy.eq(0).all()


def test_an_empty_context_begins_a_document():
    space, sampler = SequenceSpace(vocab_size=V, length=2), Autoregressive(completions=3)
    empty = sampler(target(space, contexts=Sequences.from_lists([[]])), 9, Rng(0))
    begun = sampler(target(space, contexts=Sequences.from_lists([[0]])), 9, Rng(0))
    assert empty.x.lists() == begun.x.lists()
    assert torch.equal(empty.log_base, begun.log_base)
    assert Truncation(top_k=10)(BASE.next_log_probs(CONTEXT)).isfinite().all()  # more than there are tokens: all
