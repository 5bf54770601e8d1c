"""The n-gram model against its own formulas, written a second time with dictionaries."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.ngram import NgramLM, discounts
from freenergy.testing import law

EOS = 0
V = 4
Documents = list[list[int]]
DOCUMENTS: Documents = [[1, 2, 1, 3], [2, 1], [1, 2, 1, 2, 1], [], [3]]


class Reference:
    """Modified Kneser-Ney, word for word from the formulas; slow, and sharing nothing with the model."""

    def __init__(self, documents: Documents, vocab_size: int, order: int) -> None:
        self.V, self.n = vocab_size, order
        self.c: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            text = [EOS, *document, EOS]
            for end in range(1, len(text)):
                for k in range(1, min(order, end + 1) + 1):
                    self.c[tuple(text[end + 1 - k : end + 1])] += 1

    @cached_property
    def a(self) -> dict[tuple[int, ...], int]:
        adjusted = {}
        for gram, raw in self.c.items():
            begins_document = len(gram) > 1 and gram[0] == EOS
            preceding = sum((v, *gram) in self.c for v in range(self.V))
            adjusted[gram] = raw if len(gram) == self.n or begins_document else preceding
        return adjusted

    def discount(self, k: int, count: int) -> float:
        t = Counter(a for gram, a in self.a.items() if len(gram) == k)
        D = [0.5, 1.0, 1.5]
        if t[1] and t[2] and t[3] and t[4]:
            Y = t[1] / (t[1] + 2 * t[2])
            proper = [1 - 2 * Y * t[2] / t[1], 2 - 3 * Y * t[3] / t[2], 3 - 4 * Y * t[4] / t[3]]
            if all(0 < d <= i for i, d in enumerate(proper, 1)):
                D = proper
        return D[min(count, 3) - 1]

    def p(self, w: int, h: tuple[int, ...]) -> float:
        lower = self.p(w, h[1:]) if h else 1 / self.V
        following = {v: self.a[(*h, v)] for v in range(self.V) if (*h, v) in self.a}
        if not following:
            return lower
        total = sum(following.values())
        taken = {v: self.discount(len(h) + 1, a) for v, a in following.items()}
        direct = (following[w] - taken[w]) / total if w in following else 0.0
        return direct + sum(taken.values()) / total * lower

    def next(self, context: list[int]) -> list[float]:
        context = context or [EOS]
        since = max((i for i, w in enumerate(context) if w == EOS), default=0)
        h = tuple(context[since:][-(self.n - 1) :]) if self.n > 1 else ()
        return [self.p(w, h) for w in range(self.V)]

    def log_prob(self, context: list[int], x: list[int]) -> float:
        context = context or [EOS]
        return sum(math.log(self.next(context + x[:t])[w]) for t, w in enumerate(x))


def stream(documents: Documents) -> np.ndarray:
    return np.array([token for document in documents for token in [*document, EOS]])


def fitted(documents: Documents = DOCUMENTS, order: int = 3, vocab_size: int = V) -> NgramLM:
    return NgramLM.fit(stream(documents), vocab_size=vocab_size, eos=EOS, order=order)


def zipfian(seed: int, num_documents: int = 150, vocab_size: int = 12) -> Documents:
    """Enough text of a skewed law that the counts of counts are not degenerate."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab_size)
    documents = []
    for length in generator.integers(0, 9, num_documents):
        documents.append((1 + generator.choice(vocab_size - 1, length, p=weights / weights.sum())).tolist())
    return documents


def contexts_of_every_kind() -> Iterator[list[int]]:
    """Seen, unseen, empty, at the start of a document, beyond EOS, longer than the order."""
    yield from ([], [EOS], [1], [3, 3], [EOS, 1, 2], [EOS, 3, 3], [2, EOS, 1], [1, 2, EOS], [1, 2, 1, 2, 1, 2, 1])


documents = st.lists(st.lists(st.integers(1, V - 1), max_size=7), min_size=1, max_size=8)
strings = st.lists(st.integers(0, V - 1), max_size=6)


@settings(deadline=None)
@given(documents, st.integers(1, 4), strings, strings)
def test_model_equals_the_formulas(documents: Documents, order: int, context: list[int], x: list[int]) -> None:
    lm, reference = fitted(documents, order), Reference(documents, V, order)
    probs = lm.next_log_probs(Sequences.from_lists([context])).exp()
    assert probs.tolist() == [pytest.approx(reference.next(context), rel=1e-12)]
    log_prob = lm.log_prob(Continuations.from_lists([context], [[x]]))
    assert log_prob.item() == pytest.approx(reference.log_prob(context, x), abs=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_model_equals_the_formulas_with_proper_discounts(order: int, seed: int) -> None:
    documents = zipfian(seed)
    lm, reference = fitted(documents, order, vocab_size=12), Reference(documents, 12, order)
    # a unigram model of twelve words has no counts of 1 to 4; every other model has an order with proper discounts
    fallback = [discounts(level.counts).tolist() == [0, 0.5, 1, 1.5] for level in lm.counts.levels]
    assert order == 1 or not all(fallback)
    contexts = [[], [EOS, 1], [1, 2], [2, 1, 1], [11, 11], [EOS, *documents[0][:3]]]
    probs = lm.next_log_probs(Sequences.from_lists(contexts)).exp()
    assert probs.numpy() == pytest.approx(np.array([reference.next(c) for c in contexts]), rel=1e-12)


def test_counts_of_counts_give_the_discounts() -> None:
    # t_1 … t_4 = 8, 4, 2, 1: Y = 1/2, and D(1), D(2), D(3) = 1/2, 5/4, 2
    counts = np.repeat([1, 2, 3, 4, 9], [8, 4, 2, 1, 5])
    assert discounts(counts).tolist() == [0, 1 / 2, 5 / 4, 2]


@pytest.mark.parametrize(
    "counts",
    [[1], [7, 7], [1, 2, 3], np.repeat([1, 2, 3, 4], [1, 1, 9, 1])],
    ids=["one", "all large", "no four", "D(2) below zero"],
)
def test_degenerate_counts_of_counts_fall_back(counts: list[int]) -> None:
    assert discounts(np.array(counts)).tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_conditionals_sum_to_one(order: int) -> None:
    lm = fitted(zipfian(2), order, vocab_size=12)
    total = lm.next_log_probs(Sequences.from_lists(list(contexts_of_every_kind()))).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


@pytest.mark.parametrize("eos", [EOS, None], ids=["ends with EOS", "fixed length"])
def test_strings_of_a_space_sum_to_one(eos: int | None) -> None:
    lm = fitted()
    every = SequenceSpace(vocab_size=V, length=4, eos=eos).enumerate().lists()
    contexts = list(contexts_of_every_kind())
    total = lm.log_prob(Continuations.from_lists(contexts, [every] * len(contexts))).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


@pytest.mark.parametrize("context", list(contexts_of_every_kind()), ids=str)
def test_log_prob_is_the_sum_of_its_steps(context: list[int]) -> None:
    lm, x = fitted(order=4), [1, 2, 1, EOS, 3, 1]
    begun = context or [EOS]
    steps = [lm.next_log_probs(Sequences.from_lists([begun + x[:t]]))[0, w].item() for t, w in enumerate(x)]
    assert lm.log_prob(Continuations.from_lists([context], [[x]])).item() == pytest.approx(sum(steps), abs=1e-12)


def test_context_reaches_no_further_than_eos_and_order() -> None:
    lm = fitted(order=3)
    same = [([], [EOS]), ([1, 3, EOS, 2], [EOS, 2]), ([3, 3, 3, 1, 2], [1, 2]), ([1, 2, EOS], [EOS])]
    for one, other in same:
        both = lm.next_log_probs(Sequences.from_lists([one, other]))
        assert both[0].equal(both[1])
    start, middle = lm.next_log_probs(Sequences.from_lists([[EOS, 2], [2]]))
    assert not start.equal(middle)


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(temperature=0.7, top_k=3)], ids=["plain", "truncated"])
@pytest.mark.parametrize("eos", [EOS, None], ids=["ends with EOS", "fixed length"])
def test_exact_law_of_the_sampler(truncation: Truncation, eos: int | None) -> None:
    lm, space = fitted(order=3), SequenceSpace(vocab_size=V, length=3, eos=eos)
    for context in ([], [1], [3, 3]):
        contexts = Sequences.from_lists([context])
        known: dict[tuple[int, ...], tuple[float, float]] = {}

        def draw(rng: Rng, contexts: Sequences = contexts, known: dict = known) -> tuple[int, ...]:
            draws = lm.sample(contexts, 1, space, rng, truncation)
            x = tuple(draws.x.lists()[0][0])
            known[x] = draws.log_base.item(), draws.log_proposal.item()
            return x

        drawn = law(draw, lambda x: x)
        log_prob = lm.log_prob(Continuations.from_lists([context], [[list(x) for x in drawn]]))[0]
        assert [known[x][0] for x in drawn] == pytest.approx(log_prob.tolist(), abs=1e-12)
        assert [math.exp(known[x][1]) for x in drawn] == pytest.approx(list(drawn.values()), abs=1e-14)
        assert sum(drawn.values()) == pytest.approx(1, abs=1e-12)
        if truncation.is_identity:
            assert list(drawn.values()) == pytest.approx(log_prob.exp().tolist(), abs=1e-14)
            assert len(drawn) == space.size


def test_candidates_are_independent() -> None:
    lm, space = fitted([[1, 2], [2, 1, 1]], vocab_size=3), SequenceSpace(vocab_size=3, length=2, eos=EOS)
    pairs = law(
        lambda rng: lm.sample(Sequences.from_lists([[2]]), 2, space, rng),
        lambda draws: tuple(map(tuple, draws.x.lists()[0])),
    )
    every = space.enumerate().lists()
    p = lm.log_prob(Continuations.from_lists([[2]], [every]))[0].exp().tolist()
    product = {(tuple(x), tuple(y)): p[i] * p[j] for i, x in enumerate(every) for j, y in enumerate(every)}
    assert pairs == pytest.approx(product, abs=1e-14)


def test_batch_equals_single() -> None:
    lm = fitted(order=4)
    contexts = list(contexts_of_every_kind())
    xs = [[[1, 2, EOS], [3], []], [[2, 1, 2, 1], [EOS], [3, 3]], [[1], [1, 1], [1, 1, 1]]] * 3
    batch = lm.log_prob(Continuations.from_lists(contexts, xs))
    conditionals = lm.next_log_probs(Sequences.from_lists(contexts))
    for b, context in enumerate(contexts):
        assert conditionals[b].equal(lm.next_log_probs(Sequences.from_lists([context]))[0])
        for n, x in enumerate(xs[b]):
            assert batch[b, n].item() == lm.log_prob(Continuations.from_lists([context], [[x]])).item()


@pytest.mark.parametrize("order", [1, 3])
def test_draws_do_not_depend_on_the_batch(order: int) -> None:
    lm, space = fitted(order=order), SequenceSpace(vocab_size=V, length=6, eos=EOS)
    contexts = Sequences.from_lists([[], [1, 2], [3]])
    together = lm.sample(contexts, 5, space, Rng(3))
    alone = lm.sample(contexts[1:2], 2, space, Rng(3).shift(contexts=1, candidates=3))
    assert alone.x.lists()[0] == together.x.lists()[1][3:]
    assert alone.log_base.tolist()[0] == together.log_base.tolist()[1][3:]
    torch.testing.assert_close(together.log_base, lm.log_prob(together.x), rtol=0, atol=1e-12)


def test_padding_is_inert() -> None:
    lm = fitted(order=4)
    x = Continuations.from_lists([[1], [1, 2, 1], []], [[[1], [1, 2, 1]], [[2, EOS], [3]], [[1, 2, 1, 2], []]])
    rubbish = torch.tensor(99)
    contexts = Sequences(torch.where(x.contexts.mask, x.contexts.tokens, rubbish), x.contexts.lengths)
    padded = Continuations(contexts, torch.where(x.mask, x.tokens, rubbish), x.lengths)
    assert lm.log_prob(padded).equal(lm.log_prob(x))
    assert lm.next_log_probs(contexts).equal(lm.next_log_probs(x.contexts))
    assert lm.log_prob(padded)[2, 1] == 0


@pytest.mark.parametrize("documents", [[[]], [[1]], [[1, 1, 1]], [[], []], [[1, 2, 3]]], ids=str)
@pytest.mark.parametrize("order", [1, 2, 5])
def test_tiny_corpora_give_whole_models(documents: Documents, order: int) -> None:
    lm, reference = fitted(documents, order), Reference(documents, V, order)
    contexts = list(contexts_of_every_kind())
    probs = lm.next_log_probs(Sequences.from_lists(contexts)).exp()
    assert probs.numpy() == pytest.approx(np.array([reference.next(c) for c in contexts]), rel=1e-12)
    assert (probs > 0).all()


def test_empty_batches() -> None:
    lm = fitted()
    assert lm.next_log_probs(Sequences.from_lists([])).shape == (0, V)
    assert lm.log_prob(Continuations.from_lists([], [])).shape == (0, 0)
    assert lm.log_prob(Continuations.from_lists([[1]], [[]])).shape == (1, 0)


@pytest.mark.parametrize("token", [-1, V])
def test_unknown_token_ids_are_refused(token: int) -> None:
    lm = fitted()
    with pytest.raises(UserError, match=f"token id {token} is not in the vocabulary of {V}: encode"):
        lm.next_log_probs(Sequences.from_lists([[1, token]]))
    with pytest.raises(UserError, match=f"token id {token} is not in the vocabulary of {V}: encode"):
        lm.log_prob(Continuations.from_lists([[1]], [[[token]]]))
