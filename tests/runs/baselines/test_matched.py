"""A bigger network has the parameters that it was asked to have."""

import pytest

from freenergy import UserError
from freenergy.lm.presets import PRESETS, count_parameters, preset
from freenergy.training.baselines.making import matched


@pytest.mark.parametrize("name", ["tiny", "small"])
@pytest.mark.parametrize("factor", [1.0, 1.1, 2.0, 3.7])
def test_within_five_percent(name, factor):
    shape, sizes = preset(name), {"vocab_size": 4096, "eos": 0}
    wanted = int(factor * count_parameters(shape.config(**sizes)))
    found = matched(shape, parameters=wanted, **sizes)
    assert count_parameters(found.config(**sizes)) == pytest.approx(wanted, rel=0.05)
    assert (found.layers, found.heads, found.context) == (shape.layers, shape.heads, shape.context)
    assert found.width % (8 * shape.heads) == 0
    if factor == 1.0:
        assert found == shape


def test_the_papers_pair():
    """Base and BALM of Table 1: twice the parameters of the base is what the bigger preset has."""
    sizes = {"vocab_size": 50_096, "eos": 0}
    base = count_parameters(PRESETS["paper-12l"].config(**sizes))
    found = matched(preset("paper-12l"), parameters=2 * base, **sizes)
    assert count_parameters(found.config(**sizes)) == pytest.approx(408e6, rel=0.02)
    assert abs(found.width - PRESETS["balm-12l"].width) <= 128


def test_what_cannot_be_matched_is_refused():
    with pytest.raises(UserError, match="no width of this shape has 1,000 parameters"):
        matched(preset("tiny"), parameters=1000, vocab_size=4096, eos=0)
