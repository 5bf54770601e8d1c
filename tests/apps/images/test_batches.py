"""Rows of images: every image once an epoch, chosen by step and micro-batch alone."""

import pytest
import torch
from scipy.stats import chisquare

from freenergy.apps.images.data import ImageData
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Data


def data(*, images=12, pixels=6, batch_size=4, accumulate=1, fake=2, seed=0):
    """Image n is n in its first pixel."""
    train = torch.zeros(images, pixels, dtype=torch.uint8)
    train[:, 0] = torch.arange(images)
    held_out = torch.full((205, pixels), 9, dtype=torch.uint8)
    return ImageData(train, held_out, batch_size=batch_size, accumulate=accumulate, fake=fake, rng=Rng(seed))


def numbers(source, steps):
    return torch.cat([source.batch(step, 0).tokens[:, 0] for step in steps]).tolist()


def test_every_image_once_an_epoch_in_another_order():
    source = data()
    assert isinstance(source, Data)
    assert source.epoch_steps == 3
    first, second = (numbers(source, range(a, a + 3)) for a in (1, 4))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != numbers(data(seed=1), range(1, 4))


def test_a_batch_across_two_epochs():
    source = data(images=10)
    read = numbers(source, range(1, 6))
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


def test_step_and_micro_alone_choose_the_rows():
    source = data(accumulate=2)
    forwards = {(step, micro): source.batch(step, micro) for step in range(1, 9) for micro in range(2)}
    again = data(accumulate=2)
    for (step, micro), batch in reversed(forwards.items()):
        other = again.batch(step, micro)
        assert batch.tokens.equal(other.tokens)
        assert batch.known == other.known
    parts = torch.cat([batch.tokens[:, 0] for batch in forwards.values()]).tolist()
    assert parts == numbers(data(), range(1, 9))


def test_a_batch_is_whole_images_without_anything_given():
    batch = data().batch(1, 0)
    assert batch.given is None
    assert batch.tokens.shape == (4, 6)
    assert batch.tokens.dtype == torch.long
    assert batch.mask.all()


@pytest.mark.statistical
def test_fake_rows_begin_anywhere_that_leaves_room():
    """Uniform on 0 … pixels − fake: χ² at 1e-7; a last place left out is rejected."""
    source = data(pixels=6, fake=4)
    counts = [0, 0, 0]
    for step in range(1, 1001):
        counts[source.batch(step, 0).known] += 1
    assert chisquare(counts).pvalue > 1e-7
    assert chisquare([500, 490, 10]).pvalue < 1e-7
    assert data(pixels=6, fake=6).batch(5, 0).known == 0


def test_held_out_images_come_in_order_and_all():
    parts = list(data().held_out())
    assert [len(part.tokens) for part in parts] == [100, 100, 5]
    assert all((part.tokens == 9).all() and part.mask.all() for part in parts)


def test_a_fake_row_longer_than_an_image_is_refused():
    with pytest.raises(UserError, match="fake is 7, more than the 6 pixels"):
        data(fake=7)
