"""log P of every token of given texts, against the model's own next-token law."""

import pytest
import torch

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.lm import token_log_probs as module
from freenergy.lm.token_log_probs import token_log_probs

SPACE = SequenceSpace(vocab_size=4, length=3, eos=0)
CONTEXTS = [[1, 2, 3], [], [2]]


class Bare:
    """A language model with no stepper of its own."""

    draws_here = True

    def __init__(self, lm):
        self.lm, self.vocab_size, self.eos, self.max_length = lm, lm.vocab_size, lm.eos, 9

    def next_log_probs(self, contexts):
        return self.lm.next_log_probs(contexts)

    def log_prob(self, x):
        return self.lm.log_prob(x)

    def sample(self, *arguments):
        raise AssertionError("nothing is drawn")


@pytest.fixture
def lm():
    return TabularLM.random(Rng(5), vocab_size=4, order=2)


def everything():
    strings, B = SPACE.enumerate(), len(CONTEXTS)
    tokens, lengths = strings.tokens.expand(B, -1, -1), strings.lengths.expand(B, -1)
    return Continuations(Sequences.from_lists(CONTEXTS), tokens, lengths)


@pytest.mark.parametrize("is_bare", [False, True], ids=["stepper", "no stepper"])
@pytest.mark.parametrize("numbers", [2**23, 4 * 5], ids=["at once", "in parts"])
def test_every_place_of_every_string(lm, monkeypatch, is_bare, numbers):
    monkeypatch.setattr(module, "_NUMBERS", numbers)
    x = everything()
    found = token_log_probs(Bare(lm) if is_bare else lm, x, k=3)
    for b, context in enumerate(CONTEXTS):
        for n, string in enumerate(x.lists()[b]):
            for t in range(SPACE.length):
                if t >= len(string):
                    assert found.log_prob[b, n, t] == 0
                    assert found.log_top[b, n, t].eq(0).all()
                    continue
                law = lm.next_log_probs(Sequences.from_lists([[*context, *string[:t]]]))[0]
                assert found.log_prob[b, n, t].item() == pytest.approx(law[string[t]].item(), abs=1e-12)
                values, tokens = law.topk(3)
                assert found.top[b, n, t].tolist() == tokens.tolist()
                torch.testing.assert_close(found.log_top[b, n, t], values, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.log_prob.sum(-1), lm.log_prob(x), atol=1e-12, rtol=0)


def test_the_whole_list_and_none(lm):
    x = Continuations.from_lists([[1]], [[[2, 3]]])
    assert token_log_probs(lm, x, k=4).log_top.exp().sum(-1).tolist() == [[pytest.approx([1, 1], abs=1e-12)]]
    assert token_log_probs(lm, x).top.shape == (1, 1, 2, 0)
    with pytest.raises(UserError, match=r"5 likeliest tokens .* 0 to 4"):
        token_log_probs(lm, x, k=5)


def test_nothing_to_read(lm):
    assert token_log_probs(lm, Continuations.from_lists([[1], [2]], [[[]], [[]]]), k=2).log_top.shape == (2, 1, 0, 2)
    assert token_log_probs(lm, Continuations.from_lists([], []), k=2).log_prob.shape[0] == 0


def test_a_text_beyond_the_window_is_refused(lm):
    with pytest.raises(UserError, match="9"):
        token_log_probs(Bare(lm), Continuations.from_lists([[1] * 8], [[[2, 3]]]))
