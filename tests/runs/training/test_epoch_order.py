"""Every window once an epoch, in another order each time, whatever was asked before."""

from itertools import product

import pytest
import torch

from freenergy import Rng
from freenergy.training.settings import Optimisation
from freenergy.training.task import Shuffled


@pytest.mark.parametrize(("count", "batch", "accumulate"), [(12, 4, 1), (12, 4, 2), (13, 6, 3), (5, 5, 1)])
def test_an_epoch_has_every_window_at_most_once(count, batch, accumulate):
    steps, per_epoch = Optimisation(batch_size=batch, accumulate=accumulate), count // batch
    rows, orders = Shuffled(count, steps, Rng(3)), []
    for epoch in range(3):
        places = product(range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1), range(accumulate))
        orders.append(torch.cat([rows(step, micro) for step, micro in places]).tolist())
        assert len(set(orders[-1])) == len(orders[-1]) == per_epoch * batch
        assert set(orders[-1]) <= set(range(count))
    assert len({tuple(order) for order in orders}) == 3


def test_a_step_does_not_depend_on_those_before():
    steps = Optimisation(batch_size=4, accumulate=2)
    asked, fresh = Shuffled(9, steps, Rng(0)), [Shuffled(9, steps, Rng(0)) for _ in range(7)]
    assert all(torch.equal(asked(step, 1), fresh[step](step, 1)) for step in (6, 1, 2, 5, 3))
