"""The next token under the residual model: against enumeration, draw by draw, and with honest errors."""

import itertools
import json
import math

import pytest
import torch

from freenergy import (
    Continuations,
    Residual,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Target,
    UserError,
)
from freenergy.core.truncation import Truncation
from freenergy.partition import step_log_probs
from freenergy.partition.next_token import first_given, next_token, standard_errors
from freenergy.testing.enumerating import branches

V, L = 3, 3
BASE = TabularLM.random(Rng(1), vocab_size=V, order=1)
CONTEXT, CONTEXT_OF_TWO = Sequences.from_lists([[2, 1]]), Sequences.from_lists([[1]])
each_space = pytest.mark.parametrize(
    "space", [SequenceSpace(vocab_size=V, length=L, eos=eos) for eos in (0, None)], ids=["ended", "fixed"]
)
each_head = pytest.mark.parametrize("head", [[], [1], [1, 2]], ids=str)


class Lookup:
    """One number a string of at most three tokens, EOS or padding read as what they are."""

    def __init__(self, spread=1.0, seed=3):
        self.values = spread * Rng(seed).normal(V**L * (L + 1))
        self.calls = 0

    def __call__(self, x: Continuations) -> torch.Tensor:
        self.calls += 1
        tokens = torch.nn.functional.pad(x.tokens * x.mask, (0, L - x.tokens.shape[2]))
        return self.values[(tokens * V ** torch.arange(L)).sum(-1) * (L + 1) + x.lengths]


ENERGY = Lookup()
MODEL = Residual(BASE, ENERGY)


def conditional(space, head, energy=ENERGY):
    """P(v | c, h) and log Z(c, h v) of every token, from a list of all strings of the space."""
    strings = space.enumerate()
    x = Continuations(CONTEXT, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    score = (BASE.log_prob(x) - energy(x))[0].exp().tolist()
    log_p = BASE.next_log_probs(Sequences.from_lists([CONTEXT.lists()[0] + head]))[0]
    begin = BASE.log_prob(Continuations.from_lists(CONTEXT.lists(), [[head]])).item()
    t, total = len(head), [0.0] * V
    for string, weight in zip(strings.lists(), score, strict=True):
        if string[:t] == head and len(string) > t:
            total[string[t]] += weight
    log_z = [math.log(a) - begin - log_p[v].item() for v, a in enumerate(total)]
    return [a / sum(total) for a in total], log_z


@each_space
@each_head
@pytest.mark.parametrize("top_k", [1, V, 9])
def test_with_every_ending_it_is_the_enumerated_conditional(space, head, top_k):
    found = next_token(Target(MODEL, CONTEXT, space), head, Rng(0), top_k=top_k, completions=None)
    wanted, log_z = conditional(space, head)
    base = BASE.next_log_probs(Sequences.from_lists([CONTEXT.lists()[0] + head]))[0].exp().tolist()
    k = min(top_k, V)
    assert [row.token for row in found.rows] == sorted(range(V), key=lambda v: -base[v])[:k]
    over_rows = sum(wanted[row.token] for row in found.rows)
    for rank, row in enumerate(found.rows, 1):
        assert row.joint == pytest.approx(wanted[row.token], abs=1e-12)
        assert row.base == pytest.approx(base[row.token], abs=1e-12)
        assert row.log_partition == pytest.approx(log_z[row.token], abs=1e-12)
        assert row.restricted == pytest.approx(wanted[row.token] / over_rows, abs=1e-12)
        assert row.standard_error == row.restricted_error == 0
        assert row.base_rank == rank
        assert row.joint_rank == 1 + sum(other.joint > row.joint for other in found.rows)
    assert (found.other is None) == (k == V)
    total = sum(row.joint for row in found.rows) + (found.other.joint if found.other else 0)
    assert total == pytest.approx(1, abs=1e-12)
    assert sum(row.base_restricted for row in found.rows) == pytest.approx(1, abs=1e-12)
    assert found.is_exact
    assert found.verdict() == ""
    # mutant: the base's own probabilities are something else
    assert max(abs(row.joint - row.base) for row in found.rows) > 1e-3


@each_space
def test_the_last_position_needs_no_draws(space):
    head, energy = [1, 2], Lookup()
    found = next_token(Target(Residual(BASE, energy), CONTEXT, space), head, Rng(0), top_k=2, completions=2)
    wanted, _ = conditional(space, head)
    assert found.is_exact
    assert found.base_tokens == 0
    assert energy.calls == 1
    assert [row.joint for row in found.rows] == pytest.approx([wanted[row.token] for row in found.rows], abs=1e-12)
    drawn = next_token(Target(MODEL, CONTEXT, space), head, Rng(0), top_k=2, completions=3, exact_last=False)
    assert not drawn.is_exact
    for row, exact in zip(drawn.rows, found.rows, strict=True):  # one string each: only the others are drawn
        assert row.log_partition == pytest.approx(exact.log_partition, abs=1e-12)
        assert row.ess == pytest.approx(3)


@each_space
@pytest.mark.parametrize("head", [[1], [1, 2]], ids=str)
def test_every_stratum_is_unbiased(space, head):
    """E[Ẑ] = Z of the likeliest token and of the others, over every branch of two completions each."""
    wanted, log_z = conditional(space, head)
    p = BASE.next_log_probs(Sequences.from_lists([CONTEXT.lists()[0] + head]))[0].exp().tolist()
    top = sorted(range(V), key=lambda v: -p[v])[:1]
    tail = [v for v in range(V) if v not in top]
    mean, probability, ratio, worst = [0.0] * 2, 0.0, 0.0, 0.0

    def run(rng):
        return next_token(Target(MODEL, CONTEXT, space), head, rng, top_k=1, completions=2, exact_last=False)

    for chance, found in branches(run):
        rows = [*found.rows, found.other]
        probability += chance
        mean = [m + chance * math.exp(row.log_partition) for m, row in zip(mean, rows, strict=True)]
        ratio += chance * rows[0].joint
        worst = max(worst, abs(sum(row.joint for row in rows) - 1), abs(rows[0].restricted - 1))
    assert probability == pytest.approx(1, abs=1e-12)
    assert worst < 1e-12  # probabilities sum to one on every branch
    exact = [math.exp(log_z[v]) for v in top]
    other = sum(p[v] * math.exp(log_z[v]) for v in tail) / sum(p[v] for v in tail)
    assert mean == pytest.approx([*exact, other], abs=1e-12)
    # mutants: others drawn evenly instead of from the tail; and the ratio, which is biased
    assert abs(sum(math.exp(log_z[v]) for v in tail) / 2 - other) > 1e-3
    assert abs(ratio - wanted[top[0]]) > 1e-4


def test_the_error_is_the_derivative_times_the_noise():
    """Against central differences of a_v/Σ a."""
    a = torch.tensor([0.4, 0.1, 0.03, 1.2], dtype=torch.float64)
    relative = torch.tensor([0.2, 0.5, 0.0, 0.1], dtype=torch.float64)
    variance, step = torch.zeros(4, dtype=torch.float64), 1e-6
    for u in range(4):
        move = torch.zeros(4, dtype=torch.float64)
        move[u] = step
        slope = ((a + move) / (a + move).sum() - (a - move) / (a - move).sum()) / (2 * step)
        variance += (slope * a[u] * relative[u]) ** 2
    found = standard_errors(a / a.sum(), relative)
    torch.testing.assert_close(found, variance.sqrt(), atol=1e-9, rtol=0)
    naive = a / a.sum() * relative  # mutant: a fixed denominator
    assert (found - naive).abs().max() > 0.01


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_error_is_the_spread_over_all_branches(top_k):
    """As energies flatten the delta method becomes exact: E[se²] = Var over every branch, to first order in them."""
    base, energy, m = TabularLM.random(Rng(5), vocab_size=2, order=1), Lookup(spread=1e-4), 2
    space = SequenceSpace(vocab_size=2, length=2)

    def run(rng):
        return next_token(Target(Residual(base, energy), CONTEXT_OF_TWO, space), [], rng, top_k=top_k, completions=m)

    def spread(values):
        mean = sum(chance * value for chance, value in values)
        return sum(chance * (value - mean) ** 2 for chance, value in values)

    found = [(chance, [*result.rows, *filter(None, [result.other])]) for chance, result in branches(run)]
    for i in range(2):
        variance = spread([(chance, rows[i].joint) for chance, rows in found])
        told = sum(chance * rows[i].standard_error ** 2 for chance, rows in found)
        assert told == pytest.approx(variance, rel=2e-3)
        # mutant: no correction for the mean having been estimated, (n Σu² − 1)/n
        assert told * (m - 1) / m != pytest.approx(variance, rel=0.1)
        if top_k == 2:
            assert spread([(chance, rows[i].restricted) for chance, rows in found]) == pytest.approx(variance)
            assert sum(chance * rows[i].restricted_error ** 2 for chance, rows in found) == pytest.approx(told)


def test_many_completions_come_to_the_conditional():
    space = SequenceSpace(vocab_size=V, length=L, eos=0)
    wanted, _ = conditional(space, [])
    found = next_token(Target(MODEL, CONTEXT, space), [], Rng(4), top_k=2, completions=4000)
    few = next_token(Target(MODEL, CONTEXT, space), [], Rng(4), top_k=2, completions=4)
    for row in found.rows:
        assert 0 < row.standard_error < 0.02
        assert abs(row.joint - wanted[row.token]) < 5 * row.standard_error  # 5 σ: falsely once in 10⁶ seeds
    assert found.rows[0].standard_error < few.rows[0].standard_error / 10
    assert found.base_tokens > 0
    assert found.verdict() == ""
    assert few.verdict().startswith("the model's probabilities and their errors are rough")


def test_the_same_seed_gives_the_same_table_and_a_token_keeps_its_draws():
    space = SequenceSpace(vocab_size=V, length=L)
    found, again = (next_token(Target(MODEL, CONTEXT, space), [], Rng(4), top_k=2, completions=20) for _ in range(2))
    assert found == again
    narrower = next_token(Target(MODEL, CONTEXT, space), [], Rng(4), top_k=1, completions=20)
    assert narrower.rows[0].log_partition == found.rows[0].log_partition
    assert narrower.rows[0].joint != found.rows[0].joint  # the others were drawn otherwise
    assert found.base_tokens == 3 * 20 * 2


def test_it_reads_in_parts(monkeypatch):
    space = SequenceSpace(vocab_size=V, length=L)
    whole = next_token(Target(MODEL, CONTEXT, space), [1], Rng(4), top_k=2, completions=20)
    monkeypatch.setattr("freenergy.partition.next_token._ROWS", 7)
    monkeypatch.setattr("freenergy.partition.next_token._PARTS", 3)
    assert next_token(Target(MODEL, CONTEXT, space), [1], Rng(4), top_k=2, completions=20) == whole


def test_bad_weights_are_told():
    space = SequenceSpace(vocab_size=V, length=L)
    steep = Lookup(spread=30.0)
    found = next_token(Target(Residual(BASE, steep), CONTEXT, space), [], Rng(4), top_k=2, completions=100)
    assert "one draw carries most of the weight" in {row.verdict for row in found.rows} | {found.other.verdict} or (
        "few draws carry the weight" in {row.verdict for row in found.rows} | {found.other.verdict}
    )
    assert "draw more completions" in found.verdict()


def test_what_is_forbidden_has_no_probability():
    space = SequenceSpace(vocab_size=V, length=L)
    likely = int(BASE.next_log_probs(CONTEXT).argmax())

    def forbids(x: Continuations) -> torch.Tensor:
        return torch.where(x.tokens[:, :, 0] == likely, math.inf, 0.0)

    for completions in (8, None):
        found = next_token(
            Target(Residual(BASE, forbids), CONTEXT, space), [], Rng(4), top_k=2, completions=completions
        )
        assert (found.rows[0].token, found.rows[0].joint, found.rows[0].standard_error) == (likely, 0.0, 0.0)
        assert found.rows[1].joint + found.other.joint == pytest.approx(1, abs=1e-12)
        assert found.rows[0].joint_rank == 2
        assert (found.rows[0].verdict == "no draw has any weight") == (completions == 8)
        values = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert values["rows"][0]["log_partition"] is None
        assert values["rows"][1]["joint"] == found.rows[1].joint

    def forbids_all(x: Continuations) -> torch.Tensor:
        return torch.full(x.shape, math.inf)

    for completions in (8, None):
        with pytest.raises(UserError, match="no completion is acceptable"):
            next_token(Target(Residual(BASE, forbids_all), CONTEXT, space), [], Rng(4), completions=completions)


def test_tokens_that_the_base_never_writes_have_no_row():
    never = TabularLM(torch.tensor([[0.0, -math.inf, 1.0]]), eos=0)
    space = SequenceSpace(vocab_size=V, length=2)
    for completions in (4, None):
        found = next_token(
            Target(Residual(never, ENERGY), CONTEXT, space), [], Rng(0), top_k=3, completions=completions
        )
        assert [row.token for row in found.rows] == [2, 0]
        assert found.other is None


def test_an_empty_context_begins_a_document():
    space = SequenceSpace(vocab_size=V, length=2)
    empty = next_token(Target(MODEL, Sequences.from_lists([[]]), space), [], Rng(0), completions=8)
    begun = next_token(Target(MODEL, Sequences.from_lists([[0]]), space), [], Rng(0), completions=8)
    assert empty == begun


def test_given_first_tokens_keep_their_probabilities():
    space, first = SequenceSpace(vocab_size=V, length=2), torch.tensor([0, 1, 2, 1, 0])
    two, target = Truncation(top_k=2), Target(MODEL, CONTEXT, space)
    for truncation in (Truncation(), two):
        draws = first_given(target, [1], first, Rng(0), truncation)
        assert [x[:2] for x in draws.x.lists()[0]] == [[1, v] for v in first.tolist()]
        ending = Continuations.from_lists([[2, 1, 1]], [[x[1:] for x in draws.x.lists()[0]]])
        torch.testing.assert_close(draws.log_base, BASE.log_prob(ending), atol=1e-12, rtol=0)
    last = [two(BASE.next_log_probs(Sequences.from_lists([x[:2]])))[0, x[2]].item() for x in draws.x.lists()[0]]
    step = two(BASE.next_log_probs(Sequences.from_lists([[1]])))[0][first]
    kept = step > -math.inf
    assert 0 < int(kept.sum()) < 5
    torch.testing.assert_close(
        draws.log_proposal[0][kept], (step + torch.tensor(last))[kept].double(), atol=1e-6, rtol=0
    )


class Elsewhere:
    """A language model that draws where our random numbers do not reach."""

    vocab_size, eos, max_length, draws_here = V, 0, None, False
    log_prob, next_log_probs = BASE.log_prob, BASE.next_log_probs

    def sample(self, contexts, num, space, rng, truncation=Truncation()):  # noqa: B008
        return BASE.sample(contexts, num, space, Rng(99), truncation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": [1, 1, 1]}, "nothing comes next"),
        ({"head": [0]}, "EOS is in the written part"),
        ({"head": [7]}, "not below 3"),
        ({"top_k": 0}, "top_k is 0"),
        ({"completions": 1}, "set completions to 2 or more"),
        ({"context": Sequences.from_lists([[1], [2]])}, "2 contexts"),
        ({"base": Elsewhere()}, "draws its tokens elsewhere"),
        ({"energy": lambda x: torch.full(x.shape, math.nan)}, "returned nan"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_requests_are_refused(changes, message):
    space = SequenceSpace(vocab_size=V, length=L, eos=0)
    call = {"base": BASE, "energy": ENERGY, "context": CONTEXT, "head": [1], "space": space}

    def asked(base, energy, context, head, space, **options):
        return next_token(Target(Residual(base, energy), context, space), head, Rng(0), **options)

    with pytest.raises(UserError, match=message):
        asked(**{**call, **changes})


def test_the_table_of_a_longer_head_is_that_of_the_whole_text():
    """Steps multiply to the joint probability of a text, whatever the text."""
    space = SequenceSpace(vocab_size=V, length=2)
    strings = list(itertools.product(range(V), repeat=2))
    x = Continuations.from_lists(CONTEXT.lists(), [strings])
    wanted = (BASE.log_prob(x) - ENERGY(x))[0].softmax(0).tolist()
    for string, probability in zip(strings, wanted, strict=True):
        steps = 1.0
        for t, token in enumerate(string):
            found = next_token(Target(MODEL, CONTEXT, space), string[:t], Rng(0), top_k=V, completions=None)
            steps *= next(row.joint for row in found.rows if row.token == token)
        assert steps == pytest.approx(probability, abs=1e-12)


def test_a_real_model_agrees_with_its_steps(story_model):
    """512 tokens, two positions: the last one summed over the vocabulary, the first against a sum over all endings."""
    lm, _ = story_model
    space, values = SequenceSpace(vocab_size=512, length=2), 0.7 * Rng(3).normal(512, 512)

    def energy(x: Continuations) -> torch.Tensor:
        return values[x.tokens[:, :, 0], x.tokens[:, :, -1]]

    context = Sequences.from_lists([[1, 403, 407]])
    x = lm.sample(context, 1, space, Rng(9)).x
    steps = step_log_probs(Residual(lm, energy), x, space, Rng(1), draws=2).estimate[0].exp().tolist()
    head, last = x.lists()[0][0]
    found = next_token(Target(Residual(lm, energy), context, space), [head], Rng(0), top_k=512)
    assert next(row.joint for row in found.rows if row.token == last) == pytest.approx(steps[1], abs=1e-6)
    assert sum(row.joint for row in found.rows) == pytest.approx(1, abs=1e-9)
    every = torch.cartesian_prod(torch.arange(512), torch.arange(512))
    log_p = lm.next_log_probs(context)[0].double()
    after = lm.next_log_probs(Sequences(torch.tensor([[1, 403, 407, v] for v in range(512)]), torch.full((512,), 4)))
    log_a = (log_p[:, None] + after.double() - values[every[:, 0], every[:, 1]].view(512, 512)).logsumexp(1)
    found = next_token(Target(Residual(lm, energy), context, space), [], Rng(0), top_k=3, completions=2000)
    for row in found.rows:
        assert abs(row.joint - log_a.softmax(0)[row.token].item()) < 5 * row.standard_error < 0.1  # 5 σ
    assert max(abs(row.joint - row.base) / row.standard_error for row in found.rows) > 5  # mutant: the base's own
