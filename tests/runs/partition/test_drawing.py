"""Each way to draw, by walking every branch of its randomness: E[Ẑ] = Z, to rounding."""

import math
from dataclasses import replace

import pytest
import torch

from freenergy import Continuations, Residual, Rng, Sequences, SequenceSpace, TabularLM, Target, UserError
from freenergy.partition import (
    Importance,
    StoppingRule,
    ancestral,
    distinct,
    exact_log_partition,
    log_partition,
    log_weights,
    step_log_probs,
    stratified,
)
from freenergy.partition.drawing import FirstGiven, from_strata, take
from freenergy.testing import branches

V, LENGTH = 3, 2
ENDED, FIXED = (SequenceSpace(vocab_size=V, length=LENGTH, eos=eos) for eos in (0, None))  # 7 and 9 strings
BASE = TabularLM.random(Rng(1), vocab_size=V, order=1)
CONTEXT = Sequences.from_lists([[2]])


class Table:
    """An energy with one number for each string of up to four tokens (and each context's last token)."""

    def __init__(self, spread=1.0, seed=3):
        self.values = spread * Rng(seed).normal((V + 1) ** 5)

    def __call__(self, x: Continuations) -> torch.Tensor:
        def number(context, string):
            digits = [token + 1 for token in [*context[-1:], *string]]
            return sum(digit * (V + 1) ** i for i, digit in enumerate(digits))

        rows = zip(x.contexts.lists(), x.lists(), strict=True)
        return torch.tensor([[self.values[number(c, s)] for s in strings] for c, strings in rows], dtype=torch.float64)


ENERGY = Table()
MODEL = Residual(BASE, ENERGY)
DRAWINGS = [ancestral, stratified, distinct]
each_drawing = pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
each_space = pytest.mark.parametrize("space", [ENDED, FIXED], ids=["ended", "fixed"])


def by_hand(space, context=CONTEXT, base=BASE, energy=ENERGY):
    """log Z as it is written."""
    strings = space.enumerate()
    x = Continuations(context, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    return (base.log_prob(x) - energy(x)).logsumexp(1)


def walked(draw, num, space, base=BASE, context=CONTEXT):
    """Every branch: its probability and its Ẑ."""
    found = [
        (probability, log_weights(ENERGY, drawn).exp().mean().item())
        for probability, drawn in branches(lambda rng: draw(base, context, num, space, rng))
    ]
    assert sum(p for p, _ in found) == pytest.approx(1, abs=1e-12)
    return found


def mean_and_variance(found):
    mean = sum(p * value for p, value in found)
    return mean, sum(p * (value - mean) ** 2 for p, value in found)


@each_drawing
@each_space
@pytest.mark.parametrize(("num", "tokens"), [(1, 3), (2, 3), (3, 2), (4, 2)])
def test_the_mean_of_the_estimate_is_z(draw, space, num, tokens):
    """With more draws from fewer tokens: the branches of independent draws are many."""
    space, context = replace(space, vocab_size=tokens), Sequences.from_lists([[1]])
    base = TabularLM.random(Rng(1), vocab_size=tokens, order=1)
    Z = by_hand(space, context, base).exp().item()
    found = walked(draw, num, space, base, context)
    assert mean_and_variance(found)[0] == pytest.approx(Z, abs=1e-12)
    if draw is not distinct or num < space.size:
        assert len(found) > 1
        assert sum(p * math.log(value) for p, value in found) < math.log(Z)  # Jensen


@each_space
def test_forgotten_weights_are_seen(space):
    """Mutants: distinct draws weighed alike, and strata without their random numbers."""
    Z = by_hand(space).exp().item()

    def alike(*arguments):
        drawn = distinct(*arguments)
        return replace(drawn, log_base=drawn.log_proposal)

    def fixed_start(base, contexts, num, space, rng):
        first = torch.stack([from_strata(p, num, Rng(0)) for p in base.next_log_probs(contexts).exp()])
        return base.sample(contexts, num, space, FirstGiven(rng, first))

    for mutant, num in ((alike, 5), (fixed_start, 2)):
        assert abs(mean_and_variance(walked(mutant, num, space))[0] - Z) > 1e-3


@each_space
def test_they_vary_less_than_independent_draws(space):
    free, first, whole = (mean_and_variance(walked(draw, 2, space))[1] for draw in DRAWINGS)
    assert first < free
    assert whole < free


@each_space
def test_distinct_draws_of_the_whole_space_are_exact(space):
    Z = by_hand(space).exp().item()
    for num in (space.size, space.size + 4):
        found = walked(distinct, num, space)
        assert len(found) == 1
        assert found[0][1] == pytest.approx(Z, rel=1e-14)
    drawn = distinct(BASE, CONTEXT, space.size + 4, space, Rng(0))
    assert (drawn.log_base == -math.inf).sum() == 4


@each_space
def test_distinct_draws_are_distinct(space):
    for _, drawn in branches(lambda rng: distinct(BASE, CONTEXT, 4, space, rng)):
        strings = [tuple(string) for string in drawn.x.lists()[0]]
        strings = strings[: int((drawn.log_base > -math.inf).sum())]
        assert len(set(strings)) == len(strings) >= 2
        assert set(strings) <= {tuple(string) for string in space.enumerate().lists()}
        assert drawn.log_base.logsumexp(1).item() == pytest.approx(0, abs=1e-12)  # masses add up to one


def test_what_is_taken_stands_for_the_rest():
    mass = torch.tensor([0.4, 0.0, 0.05, 0.25, 0.2, 0.1], dtype=torch.float64)
    standing = torch.zeros(6, dtype=torch.float64)
    for probability, (taken, stands_for) in branches(lambda rng: take(mass, 3, rng)):
        assert taken.unique().equal(taken)
        assert len(taken) <= 3
        assert stands_for[0] == 0.4  # above the cut c = 0.6/2: taken for sure, with its own mass
        assert stands_for.sum().item() == pytest.approx(1, abs=1e-14)
        standing[taken] += probability * stands_for
    torch.testing.assert_close(standing, mass, atol=1e-14, rtol=0)


def test_counts_from_strata_are_right_to_within_two():
    mass = torch.tensor([0.05, 0.0, 0.61, 0.34], dtype=torch.float64)
    expected = torch.zeros(4, dtype=torch.float64)
    for probability, chosen in branches(lambda rng: from_strata(mass, 7, rng)):
        counts = torch.bincount(chosen, minlength=4)
        assert counts.sum() == 7
        assert ((counts - 7 * mass).abs() < 2).all()
        expected += probability * counts.double()
    torch.testing.assert_close(expected, 7 * mass, atol=1e-12, rtol=0)


@each_drawing
@each_space
def test_contexts_draw_for_themselves(draw, space):
    """Different contexts and different batches have different randomness; the same name has the same."""
    contexts = Sequences.from_lists([[2], [2], []])
    both, again = (draw(BASE, contexts, 5, space, Rng(7)).x.tokens for _ in range(2))
    assert torch.equal(both, again)
    alone = draw(BASE, contexts[1:2], 5, space, Rng(7).shift(contexts=1)).x.tokens
    assert torch.equal(alone[0], both[1])
    seen = [
        draw(BASE, CONTEXT, 1, FIXED, Rng(7).shift(contexts=b, candidates=n)).x.lists()
        for b in range(6)
        for n in (0, 1)
    ]
    assert len({str(x) for x in seen}) > 2


def test_a_model_that_draws_elsewhere_cannot_be_stratified():
    class Elsewhere:
        def __getattr__(self, name):
            return getattr(BASE, name)

        def sample(self, contexts, num, space, rng, truncation=None):
            return BASE.sample(contexts, num, space, Rng(0))

    elsewhere = Elsewhere()
    elsewhere.vocab_size, elsewhere.eos, elsewhere.max_length = V, 0, None
    with pytest.raises(UserError, match="Elsewhere draws its tokens elsewhere"):
        stratified(elsewhere, CONTEXT, 50, FIXED, Rng(1))


def test_more_draws_than_fit_a_chunk():
    """The first tokens of candidate 4096 up are those of candidate 4096 up."""
    drawn = stratified(BASE, CONTEXT, 5000, FIXED, Rng(1)).x.tokens[0, :, 0]
    probs = BASE.next_log_probs(CONTEXT)[0].exp()
    assert ((torch.bincount(drawn, minlength=V) - 5000 * probs).abs() < 2).all()


@each_space
def test_exact_enumeration(space):
    contexts = Sequences.from_lists([[2], [], [1, 0]])
    found = exact_log_partition(Target(MODEL, contexts, space))
    for b in range(3):
        assert found[b].item() == pytest.approx(by_hand(space, contexts[b : b + 1]).item(), abs=1e-12)
    single = SequenceSpace(vocab_size=V, length=1)
    wanted = by_hand(single)
    assert exact_log_partition(Target(MODEL, CONTEXT, single)).item() == pytest.approx(wanted.item(), abs=1e-12)


def test_a_large_space_is_not_enumerated():
    with pytest.raises(UserError, match="strings"):
        exact_log_partition(Target(MODEL, CONTEXT, SequenceSpace(vocab_size=V, length=30)))


@pytest.mark.parametrize("draw", ["ancestral", "stratified"])
def test_adaptive_draws_stop_when_the_interval_is_narrow(draw):
    target = Target(MODEL, Sequences.from_lists([[2], [1]]), ENDED)
    until = StoppingRule(width_nats=0.2, max_draws=20_000, check_every=500)
    found = Importance(until=until, draw=draw)(target, Rng(2))
    exact = exact_log_partition(target)
    assert (found.draws < 20_000).all()
    assert (found.draws % 500 == 0).all()
    assert ((found.upper - found.lower) <= 0.2).all()
    assert (found.standard_error <= 0.2 / 2 / 1.96).all()
    assert found.verdict() == ""
    assert (found.lower - exact).abs().max() < 0.25
    narrow = Importance(until=StoppingRule(width_nats=0.05))(target, Rng(2))
    assert (narrow.draws > found.draws).all()


def test_adaptive_draws_are_the_draws():
    """What comes out is the estimate from the same draws at once; the other contexts do not matter."""
    contexts = Sequences.from_lists([[2], [1]])
    found = Importance(until=StoppingRule(width_nats=0.2, check_every=100))(Target(MODEL, contexts, ENDED), Rng(2))
    n = int(found.draws[1])
    drawn = BASE.sample(contexts, n, ENDED, Rng(2)).x
    again = log_partition(-ENERGY(drawn))
    assert again.lower[1].item() == pytest.approx(found.lower[1].item(), abs=1e-12)


def test_adaptive_draws_do_not_trust_a_warned_estimate():
    """Ten draws that look alike are narrow and tell nothing: the verdict keeps it going."""
    flat, wild = (Target(Residual(BASE, Table(spread=spread)), CONTEXT, FIXED) for spread in (0.01, 8.0))
    until = StoppingRule(width_nats=10.0, max_draws=700, check_every=10)
    found = Importance(until=until)(flat, Rng(2))
    assert found.n > 20
    assert found.verdict() == ""
    found = Importance(until=until)(wild, Rng(2))
    assert found.n == 700 or found.verdict() == ""


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_bad_energies_are_refused_wherever_they_are_read(value):
    """NaN and −inf by name of the energy; +inf is a weight of zero. A mutant that reads unchecked gives NaN or inf."""
    bad = Residual(BASE, lambda x: torch.where(x.tokens[:, :, 0] == 1, value, 0.0).double())
    target, x = Target(bad, CONTEXT, FIXED), Continuations.from_lists([[2]], [[[1, 1]]])
    calls = [
        lambda: exact_log_partition(target),
        lambda: Importance()(target, Rng(0)),
        lambda: log_weights(bad.energy, distinct(BASE, CONTEXT, 9, FIXED, Rng(0))),
        lambda: step_log_probs(bad, x, FIXED, Rng(0), draws=2),
    ]
    for call in calls:
        with pytest.raises(UserError, match=f"the energy function returned {value}"):
            call()
    forbidding = Residual(BASE, lambda x: torch.where(x.tokens[:, :, 0] == 1, math.inf, 0.0).double())
    allowed = 1 - BASE.next_log_probs(CONTEXT)[0, 1].exp().item()
    assert exact_log_partition(Target(forbidding, CONTEXT, FIXED)).exp().item() == pytest.approx(allowed)


def test_bad_settings_are_refused():
    for bad in ({"width_nats": 0.0}, {"max_draws": 1}, {"check_every": 0}):
        with pytest.raises(UserError, match="set"):
            StoppingRule(**bad)
    with pytest.raises(UserError, match="no contexts"):
        Importance()(Target(MODEL, Sequences.from_lists([]), FIXED), Rng(0))
