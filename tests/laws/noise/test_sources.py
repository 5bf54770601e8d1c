"""Negatives of a window depend on the seed and its number alone, have the law that they say, and keep their shares."""

import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, Truncation, UserError
from freenergy.core.roles import Draws, NegativeSource
from freenergy.noise.settings import BaseNegatives, InfilledNegatives, NegativeSettings, divide
from freenergy.noise.sources import FromBase, Mixed
from freenergy.testing.enumerating import law

V, L = 4, 3
SPACE = SequenceSpace(vocab_size=V, length=L, eos=0)
LM = TabularLM.random(Rng(2), vocab_size=V, order=2)
ROWS = torch.tensor([40, 3, 17, 4, 5, 1000, 6])


def data(rows):
    contexts = [[row % V, row // V % V] for row in rows.tolist()]
    return Continuations.from_lists(contexts, [[[1, 2, 0]]] * len(contexts))


def draw(source, rows, num=5, seed=1):
    return source.draw(rows, data(rows), num, Rng(seed))


@pytest.mark.parametrize("together", [True, False])
def test_a_window_draws_the_same_whatever_the_batch(together):
    source = FromBase(LM, SPACE, together=together)
    assert isinstance(source, NegativeSource)
    whole = draw(FromBase(LM, SPACE), ROWS)
    order = torch.tensor([6, 0, 2, 5, 1, 3, 4])
    shuffled = draw(source, ROWS[order])
    assert torch.equal(shuffled.x.tokens, whole.x.tokens[order])
    assert torch.equal(shuffled.log_base, whole.log_base[order])
    for b in range(len(ROWS)):
        alone = draw(source, ROWS[b : b + 1])
        assert alone.x.lists()[0] == whole.x.lists()[b]
        assert torch.equal(alone.log_proposal[0], whole.log_proposal[b])
    assert torch.equal(draw(source, ROWS, num=3).x.tokens, whole.x.tokens[:, :3])


def test_windows_and_seeds_differ():
    rows = torch.tensor([8, 24])  # the same prefix
    draws = draw(FromBase(LM, SPACE), rows, num=8)
    assert draws.x.contexts.lists()[0] == draws.x.contexts.lists()[1]
    assert draws.x.lists()[0] != draws.x.lists()[1]
    assert draws.x.lists() != draw(FromBase(LM, SPACE), rows, num=8, seed=2).x.lists()


def test_small_chunks_of_the_model_change_nothing(monkeypatch):
    whole = draw(FromBase(LM, SPACE), ROWS)
    monkeypatch.setattr("freenergy.lm.tabular._ROWS", 2)
    assert torch.equal(draw(FromBase(LM, SPACE), ROWS).x.tokens, whole.x.tokens)


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=2, temperature=0.7)], ids=["plain", "truncated"])
def test_the_law_is_the_one_that_is_said(truncation):
    source = FromBase(LM, SPACE, truncation)
    rows = torch.tensor([3])
    draws = law(lambda rng: source.draw(rows, data(rows), 1, rng), lambda d: (tuple(d.x.lists()[0][0]), *numbers(d)))
    assert sum(draws.values()) == pytest.approx(1)
    for (_, log_base, log_proposal), probability in draws.items():
        assert log_proposal == pytest.approx(torch.tensor(probability, dtype=torch.float64).log().item(), abs=1e-12)
        assert (log_base == log_proposal) == truncation.is_identity
    assert source.is_relative == (not truncation.is_identity)


def numbers(draws):
    return draws.log_base.item(), draws.log_proposal.item()


class OtherStreams:
    """A language model that names streams by the place in the batch."""

    vocab_size, eos, max_length = V, 0, None

    def log_prob(self, x):
        return LM.log_prob(x)

    def next_log_probs(self, contexts):
        return LM.next_log_probs(contexts)

    def sample(self, contexts, num, space, rng, truncation):
        first = rng.origin[0]
        parts = [
            LM.sample(contexts[b : b + 1], num, space, rng.child("own", first + b), truncation)
            for b in range(len(contexts))
        ]
        return Draws.cat(parts, dim=0)


def test_a_model_with_streams_of_its_own_draws_window_by_window():
    with pytest.raises(UserError, match="together=False"):
        draw(FromBase(OtherStreams(), SPACE), ROWS)
    source = FromBase(OtherStreams(), SPACE, together=False)
    assert torch.equal(draw(source, ROWS).x.tokens[2:4], draw(source, ROWS[2:4]).x.tokens)


def test_a_mixture_stands_side_by_side():
    plain, cold = FromBase(LM, SPACE), FromBase(LM, SPACE, Truncation(top_k=1))
    mixed = Mixed([(plain, 3), (cold, 2)])
    draws = draw(mixed, ROWS)
    assert draws.x.shape == (len(ROWS), 5)
    assert torch.equal(draws.log_base[:, :3], draws.log_proposal[:, :3])
    assert (draws.log_proposal[:, 3:] == 0).all()
    assert torch.equal(draws.x.tokens[:, 3], draws.x.tokens[:, 4])  # the likeliest token each time
    assert mixed.is_relative
    assert not Mixed([(plain, 2)]).is_relative
    with pytest.raises(UserError, match="ask for 5"):
        draw(mixed, ROWS, num=4)


def test_parts_of_a_mixture_are_independent():
    plain = FromBase(LM, SPACE)
    draws = draw(Mixed([(plain, 8), (plain, 8)]), ROWS, num=16)
    assert not torch.equal(draws.x.tokens[:, :8], draws.x.tokens[:, 8:])


def test_a_source_that_says_nothing_is_relative():
    class Foreign:
        def draw(self, rows, data, num, rng):
            return FromBase(LM, SPACE).draw(rows, data, num, rng)

    assert Mixed([(FromBase(LM, SPACE), 1), (Foreign(), 1)]).is_relative


@pytest.mark.parametrize("total", range(3, 40))
def test_division(total):
    for shares in [(1.0, 1.0, 1.0), (5.0, 2.0, 1.0), (1e-9, 1.0, 1e-9), (0.3, 0.3, 0.4)]:
        counts = divide(total, shares)
        assert sum(counts) == total
        assert min(counts) >= 1
        wanted = [total * share / sum(shares) for share in shares]
        if min(wanted) >= 1:
            assert all(abs(count - number) < 1 for count, number in zip(counts, wanted, strict=True))


def test_settings():
    settings = NegativeSettings(
        per_prefix=8, sources=(BaseNegatives(share=3.0), InfilledNegatives(share=1.0, model="somewhere"))
    )
    assert settings.counts == (6, 2)
    assert settings.is_relative
    assert not NegativeSettings().is_relative
    assert NegativeSettings().counts == (16,)
    assert NegativeSettings(sources=(BaseNegatives(top_p=0.9),)).is_relative


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NegativeSettings(per_prefix=0), "at least one negative a prefix"),
        (lambda: NegativeSettings(validation_per_prefix=0), "at least one negative a prefix"),
        (lambda: NegativeSettings(windows=-1), "0 for all"),
        (lambda: NegativeSettings(validation_windows=0), "validation_windows"),
        (lambda: NegativeSettings(shard=0), "shard"),
        (lambda: NegativeSettings(sources=()), "at least one source"),
        (lambda: NegativeSettings(per_prefix=1, sources=(BaseNegatives(), BaseNegatives())), "2 or more"),
        (lambda: BaseNegatives(share=0.0), "share"),
        (lambda: BaseNegatives(share=float("nan")), "share"),
        (lambda: BaseNegatives(temperature=0.0), "temperature"),
        (lambda: BaseNegatives(top_k=0), "top_k"),
        (lambda: InfilledNegatives(model="m", mask_share=0.0), "mask_share"),
        (lambda: InfilledNegatives(model="m", share=-1.0), "share"),
    ],
)
def test_settings_that_cannot_be(make, words):
    with pytest.raises(UserError, match=words):
        make()
