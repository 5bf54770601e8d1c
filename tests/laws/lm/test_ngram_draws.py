"""Draws down the orders: u ↦ token is piecewise constant, and the pieces of a token are as long as its probability."""

import numpy as np
import pytest
import torch

from freenergy import NgramLM, Rng, Sequences, SequenceSpace, UserError
from freenergy.lm.ngram_draws import NgramMixture

V, EOS, EPS = 6, 0, 1e-11
STREAM = np.array([1, 2, 1, 3, 0, 1, 2, 2, 0, 3, 1, 2, 1, 0, 1, 2, 1, 3, 0, 4, 0])  # 5 was never seen
CONTEXTS = [[], [1], [1, 2], [3, 1, 2], [5], [1, 5], [2, 5, 1], [4, 4]]


def fitted(order):
    return NgramLM.fit(STREAM, vocab_size=V, eos=EOS, order=order)


def nodes_of(lm, contexts):
    return [np.zeros(len(contexts), dtype=np.int64), *lm.ends(Sequences.from_lists(contexts))]


def pieces(lm, nodes):
    """(token, begin, end) in the order of the walk, from the tables alone."""
    begin, passed = 0.0, 1.0
    for table, (node,) in list(zip(lm.tables, nodes, strict=True))[::-1]:
        for child in table.children(np.array([node]))[1]:
            yield int(table.keys[child] % V), begin, begin + passed * table.direct[child]
            begin += passed * table.direct[child]
        passed *= table.rest[node]
    for token in range(V):
        yield token, begin + passed * token / V, begin + passed * (token + 1) / V


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_the_pieces_of_a_token_have_its_probability(order, context):
    lm = fitted(order)
    nodes = nodes_of(lm, [context])
    own, found = torch.zeros(V, dtype=torch.float64), lm._mixture
    for token, begin, end in pieces(lm, nodes):
        own[token] += end - begin
        if end - begin > 2 * EPS:
            inside = np.array([begin + EPS, (begin + end) / 2, end - EPS])
            assert found.tokens([node.repeat(3) for node in nodes], inside).tolist() == [token] * 3
    torch.testing.assert_close(own, lm.next_log_probs(Sequences.from_lists([context]))[0].exp(), rtol=0, atol=1e-14)


def test_ends_of_the_unit_interval_are_tokens():
    lm = fitted(4)
    for context in CONTEXTS:
        tokens = lm._mixture.tokens([n.repeat(2) for n in nodes_of(lm, [context])], np.array([0.0, np.nextafter(1, 0)]))
        assert ((tokens >= 0) & (tokens < V)).all()


def broken(lm, how):
    tables = [table._replace(rest=how(table.rest)) for table in lm.tables]
    return NgramMixture.of(tables, V)


@pytest.mark.parametrize("how", [np.sqrt, np.square], ids=["too much", "too little"])
def test_mutants_with_another_mass_for_lower_orders_are_seen(how):
    """Each places some piece elsewhere."""
    lm = fitted(3)
    nodes, wrong = nodes_of(lm, [[1, 2]]), 0
    mutant = broken(lm, how)
    for token, begin, end in pieces(lm, nodes):
        wrong += mutant.tokens(nodes, np.array([(begin + end) / 2])).tolist() != [token]
    assert wrong > 0


def test_draws_report_their_probability_and_stop_at_eos():
    lm, space = fitted(4), SequenceSpace(vocab_size=V, length=7, eos=EOS)
    draws = lm.sample(Sequences.from_lists(CONTEXTS), 40, space, Rng(5))
    torch.testing.assert_close(draws.log_base, lm.log_prob(draws.x), rtol=0, atol=1e-12)
    assert draws.log_base.equal(draws.log_proposal)
    assert all(EOS not in x[:-1] and (x[-1] == EOS or len(x) == 7) for row in draws.x.lists() for x in row)


def test_draws_of_nothing_are_refused():
    with pytest.raises(UserError, match="at least one of each"):
        fitted(2).sample(Sequences.from_lists([[1]]), 0, SequenceSpace(vocab_size=V, length=2), Rng(0))
