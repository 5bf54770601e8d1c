"""Negatives of a window depend on the seed and its number alone, have the law that they say, and keep their shares."""

import pytest
import torch

from freenergy import Continuations, Rng, SequenceSpace, TabularLM, Truncation, UserError
from freenergy.core.roles import Draws, Examples
from freenergy.noise.from_lm import FromLM
from freenergy.noise.mixture import Mixture
from freenergy.noise.settings import BaseNegatives, InfilledNegatives, LearnedNegatives, NegativeSettings, divide
from freenergy.testing.training import draws_of

V, L = 4, 3
SPACE = SequenceSpace(vocab_size=V, length=L, eos=0)
LM = TabularLM.random(Rng(2), vocab_size=V, order=2)
ROWS = torch.tensor([40, 3, 17, 4, 5, 1000, 6])


def data(rows):
    contexts = [[row % V, row // V % V] for row in rows.tolist()]
    return Continuations.from_lists(contexts, [[[1, 2, 0]]] * len(contexts))


def draw(source, rows, num=5, seed=1):
    return draws_of(source, rows, data(rows), num, Rng(seed))


@pytest.mark.parametrize("together", [True, False])
def test_a_window_draws_the_same_whatever_the_batch(together):
    source = FromLM(LM, SPACE, together=together)
    whole = draw(FromLM(LM, SPACE), ROWS)
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
    draws = draw(FromLM(LM, SPACE), rows, num=8)
    assert draws.x.contexts.lists()[0] == draws.x.contexts.lists()[1]
    assert draws.x.lists()[0] != draws.x.lists()[1]
    assert draws.x.lists() != draw(FromLM(LM, SPACE), rows, num=8, seed=2).x.lists()


def test_small_chunks_of_the_model_change_nothing(monkeypatch):
    whole = draw(FromLM(LM, SPACE), ROWS)
    monkeypatch.setattr("freenergy.lm.tabular._ROWS", 2)
    assert torch.equal(draw(FromLM(LM, SPACE), ROWS).x.tokens, whole.x.tokens)


class OtherStreams:
    """A language model that names streams by the place in the batch."""

    vocab_size, eos, max_length, draws_here = V, 0, None, True

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
        draw(FromLM(OtherStreams(), SPACE), ROWS)
    source = FromLM(OtherStreams(), SPACE, together=False)
    assert torch.equal(draw(source, ROWS).x.tokens[2:4], draw(source, ROWS[2:4]).x.tokens)


def test_a_mixture_stands_side_by_side():
    plain, cold = FromLM(LM, SPACE), FromLM(LM, SPACE, Truncation(top_k=1))
    mixed = Mixture([(plain, 3), (cold, 2)])
    draws = draw(mixed, ROWS)
    assert draws.x.shape == (len(ROWS), 5)
    assert torch.equal(draws.log_base[:, :3], draws.log_proposal[:, :3])
    assert (draws.log_proposal[:, 3:] == 0).all()
    assert torch.equal(draws.x.tokens[:, 3], draws.x.tokens[:, 4])  # the likeliest token each time
    with pytest.raises(UserError, match="ask for 5"):
        draw(mixed, ROWS, num=4)


def test_parts_of_a_mixture_are_independent():
    plain = FromLM(LM, SPACE)
    draws = draw(Mixture([(plain, 8), (plain, 8)]), ROWS, num=16)
    assert not torch.equal(draws.x.tokens[:, :8], draws.x.tokens[:, 8:])


def test_the_law_of_a_mixture_is_unknown_where_that_of_a_part_is():
    class Foreign:
        def init(self, rng):
            return {"drawn": torch.zeros(1)}

        def draw(self, model, state, data, num, rng):
            return {"drawn": state["drawn"] + 1}, FromLM(LM, SPACE).draw(model, {}, data, num, rng)[1]

        def log_noise(self, x):
            return None

    mixed = Mixture([(FromLM(LM, SPACE), 1), (Foreign(), 1)])
    assert mixed.log_noise(data(ROWS)) is None
    state = mixed.init(Rng(0))
    for _ in range(2):
        state, _ = mixed.draw(None, state, Examples(data(ROWS), ROWS), 2, Rng(0))
    assert state == {"1.drawn": 2.0}  # a part keeps its own state


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
    assert (NegativeSettings().is_relative, NegativeSettings().is_base) == (False, True)
    assert NegativeSettings().counts == (16,)
    assert NegativeSettings(sources=(BaseNegatives(top_p=0.9),)).is_relative  # zero on some text
    tempered = NegativeSettings(sources=(BaseNegatives(temperature=0.9),))
    assert (tempered.is_relative, tempered.is_base) == (False, False)  # its law is known and corrected for
    both = NegativeSettings(sources=(BaseNegatives(top_k=2), BaseNegatives()))
    assert (both.is_relative, both.is_base) == (False, False)  # the second covers what the first never draws
    learned = NegativeSettings(sources=(LearnedNegatives(),), fresh=True)
    assert (learned.is_relative, learned.is_base, learned.learns) == (False, False, True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NegativeSettings(per_prefix=0), "at least one negative per prefix"),
        (lambda: NegativeSettings(validation_per_prefix=0), "at least one negative per prefix"),
        (lambda: NegativeSettings(windows=-1), "0 for all"),
        (lambda: NegativeSettings(validation_windows=0), "validation_windows"),
        (lambda: NegativeSettings(shard=0), "shard"),
        (lambda: NegativeSettings(sources=()), "at least one source"),
        (lambda: NegativeSettings(per_prefix=1, sources=(BaseNegatives(), BaseNegatives())), "2 or more"),
        (lambda: NegativeSettings(sources=(LearnedNegatives(),)), "negatives.fresh = true"),
        (lambda: NegativeSettings(sources=(LearnedNegatives(), BaseNegatives()), fresh=True), "the only source"),
        (lambda: LearnedNegatives(rate=-1.0), "rate"),
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
