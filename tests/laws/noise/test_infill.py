"""Negatives by infilling: the exact law, EOS untouched, the same negatives whatever the batch."""

from itertools import product

import pytest
import torch
import transformers

from freenergy import Continuations, Rng, TabularLM, UserError
from freenergy.lm.presets import build
from freenergy.noise.infill import Infilling
from freenergy.testing import law
from freenergy.testing.training import draws_of

V, EOS, MASK = 4, 0, 4


def source(share=0.4):
    config = transformers.GPTNeoXConfig(
        vocab_size=V + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=12, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = build(config, Rng(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)  # far from uniform, so that a wrong law shows
    return Infilling(model, mask_token=MASK, share=share, lm=TabularLM.random(Rng(1), vocab_size=V, order=1, eos=EOS))


def log_fill(infilling, context, masked):
    """log q at each place, by the network's own attention without a causal mask; EOS and the mask are never written."""
    tokens = torch.tensor([context + masked])
    T = tokens.shape[1]
    with torch.no_grad():
        logits = infilling.model(tokens, attention_mask=torch.zeros(1, 1, T, T)).logits[0, len(context) :].double()
    logits[:, [EOS, MASK]] = -torch.inf
    return logits.log_softmax(-1)


def exact_law(infilling, context, x):
    """Σ over masks m of Pr[m] · Π_{t: m_t = 1} q(x̃_t | c, x with masks), by brute force."""
    total = {}
    open_places = [t for t, token in enumerate(x) if token != EOS]
    for coins in product([0, 1], repeat=len(open_places)):
        hidden = [t for t, coin in zip(open_places, coins, strict=True) if coin]
        weight = infilling.share ** len(hidden) * (1 - infilling.share) ** (len(open_places) - len(hidden))
        log_q = log_fill(infilling, context, [MASK if t in hidden else token for t, token in enumerate(x)])
        for new in product(range(1, V), repeat=len(hidden)):
            filled = list(x)
            for t, token in zip(hidden, new, strict=True):
                filled[t] = token
            p = weight * float(sum((log_q[t, filled[t]] for t in hidden), torch.tensor(0.0)).exp())
            total[tuple(filled)] = total.get(tuple(filled), 0.0) + p
    return total


@pytest.mark.parametrize(("context", "x"), [([1, 2], [3, 1]), ([], [2, 3, EOS]), ([3], [1, EOS])])
def test_its_law_is_exact(context, x):
    infilling, data = source(), Continuations.from_lists([context], [[x]])
    found = law(
        lambda rng: draws_of(infilling, torch.tensor([0]), data, 1, rng), lambda draws: tuple(draws.x.lists()[0][0])
    )
    wanted = exact_law(infilling, context or [EOS], x)
    assert set(found) == set(wanted)
    assert abs(sum(found.values()) - 1) < 1e-9
    assert max(abs(found[key] - wanted[key]) for key in wanted) < 1e-6
    uniform = 1 / len(wanted)
    assert max(abs(p - uniform) for p in wanted.values()) > 0.05  # a law that a wrong one could not pass for


def test_log_base_and_log_proposal():
    """With a share of 1 every place is masked, so log_proposal is the log-probability of the whole."""
    infilling, x = source(share=1.0), [3, 1, 2, EOS]
    data = Continuations.from_lists([[1, 2]], [[x]])
    draws = draws_of(infilling, torch.tensor([5]), data, 6, Rng(0))
    assert torch.equal(draws.log_base, infilling.lm.log_prob(draws.x))
    log_q = log_fill(infilling, [1, 2], [MASK, MASK, MASK, EOS])
    for n, filled in enumerate(draws.x.lists()[0]):
        assert filled[3] == EOS
        assert not {EOS, MASK} & set(filled[:3])
        wanted = sum(float(log_q[t, filled[t]]) for t in range(3))
        assert abs(float(draws.log_proposal[0, n]) - wanted) < 1e-5
    assert len({tuple(filled) for filled in draws.x.lists()[0]}) > 1


def test_what_is_not_masked_costs_nothing():
    infilling = source(share=1e-9)
    data = Continuations.from_lists([[1, 2]], [[[3, 1, 2]]])
    draws = draws_of(infilling, torch.tensor([0]), data, 4, Rng(0))
    assert draws.x.lists() == [[[3, 1, 2]] * 4]
    assert torch.equal(draws.log_proposal, torch.zeros(1, 4, dtype=torch.float64))


def test_negatives_depend_on_the_window_alone():
    infilling = source()
    contexts, data = [[1, 2], [3], []], [[[3, 1, 2]], [[2, EOS]], [[1, 1, 1]]]
    whole = draws_of(infilling, torch.tensor([7, 2, 9]), Continuations.from_lists(contexts, data), 5, Rng(3))
    for b, row in enumerate([7, 2, 9]):
        one = Continuations.from_lists(contexts[b : b + 1], data[b : b + 1])
        alone = draws_of(infilling, torch.tensor([row]), one, 5, Rng(3))
        assert alone.x.lists()[0] == whole.x.lists()[b]
        torch.testing.assert_close(alone.log_proposal[0], whole.log_proposal[b], atol=1e-5, rtol=0)
    assert whole.x.contexts.lists() == contexts


def test_the_size_of_chunks_changes_nothing(monkeypatch):
    infilling, data = source(), Continuations.from_lists([[1, 2]], [[[3, 1, 2]]])
    whole = draws_of(infilling, torch.tensor([0]), data, 7, Rng(3))
    monkeypatch.setattr("freenergy.noise.infill._LOGITS", 60)
    parts = draws_of(infilling, torch.tensor([0]), data, 7, Rng(3))
    assert parts.x.lists() == whole.x.lists()


def test_refusals_are_one_sentence():
    with pytest.raises(UserError, match=r"share is 0.0: set it above 0 and at most 1"):
        source(share=0.0)
    with pytest.raises(UserError, match="do not fit the model's context of 12 tokens"):
        draws_of(source(), torch.tensor([0]), Continuations.from_lists([[1] * 10], [[[1, 2, 3]]]), 1, Rng(0))
