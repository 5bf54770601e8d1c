"""Every registered objective: one row."""

import pytest

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM
from freenergy.objectives.registry import OBJECTIVES
from freenergy.testing import check_objective

ROWS = {
    "binary": [{}, {"noise_ratio": 3.5}],
    "conditional": [{"kind": "conditional"}],
    "ranking": [{}],
}
SPACE = SequenceSpace(vocab_size=3, length=2, eos=0).enumerate()
X = Continuations(Sequences.from_lists([[]]), SPACE.tokens[None], SPACE.lengths[None])
LOG_DATA, LOG_NOISE = (TabularLM.random(Rng(seed), vocab_size=3, order=1).log_prob(X)[0] for seed in (1, 22))


def test_every_objective_has_a_row():
    assert set(ROWS) == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "settings"), [(name, row) for name, rows in ROWS.items() for row in rows], ids=str)
@pytest.mark.parametrize("num", [1, 2])
def test_the_truth_is_the_optimum_for_any_noise(name, settings, num):
    check_objective(OBJECTIVES[name](**settings), LOG_DATA, LOG_NOISE, num=num)


class Mutant:
    """Binary NCE that forgets the law of the noise, or flips its sign, or is flat."""

    kind = "mutant"

    def __init__(self, law):
        self.law = law

    def __call__(self, data, negatives):
        data, negatives = (type(each)(each.log_score, self.law * each.log_noise) for each in (data, negatives))
        return OBJECTIVES["binary"]()(data, negatives)


@pytest.mark.parametrize("law", [0.0, -1.0, 2.0])
def test_an_objective_that_gets_the_noise_wrong_is_refused(law):
    with pytest.raises(AssertionError, match="not zero"):
        check_objective(Mutant(law), LOG_DATA, LOG_NOISE)
