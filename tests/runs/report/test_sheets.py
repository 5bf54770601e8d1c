"""Sheets of images: every image in its place, readable as a picture."""

import matplotlib.image
import numpy as np
import pytest

from freenergy.core.errors import UserError
from freenergy.report.experiment_figures import draw_sheet


def read(path):
    return (matplotlib.image.imread(path)[..., :3] * 255).round().astype(np.uint8)


@pytest.mark.parametrize("colours", [(), (1,), (3,)])
def test_every_image_is_in_its_place(tmp_path, colours):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, *colours), dtype=np.uint8)
    draw_sheet(images, tmp_path / "sheet.png", zoom=2)
    sheet = read(tmp_path / "sheet.png")
    assert sheet.shape == (2 * (2 * 5 + 1), 2 * (3 * 7 + 1), 3), "three columns, two rows, a line between"
    small = sheet[::2, ::2]
    np.testing.assert_array_equal(small, sheet[1::2, 1::2])
    for k, image in enumerate(images.reshape(5, 4, 6, -1)):
        top, left = 1 + k // 3 * 5, 1 + k % 3 * 7
        np.testing.assert_array_equal(small[top : top + 4, left : left + 6], np.broadcast_to(image, (4, 6, 3)))
    assert len(np.unique(small[6:10, 15:21])) == 1, "the sixth place is empty"


def test_equal_images_are_equal_bytes(tmp_path):
    images = np.zeros((1, 2, 2), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        draw_sheet(images, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert b"Matplotlib" not in (tmp_path / "a.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_what_is_no_image_is_refused(tmp_path):
    for shape in ((0, 2, 2), (1, 2, 2, 2)):
        with pytest.raises(UserError, match="cannot be drawn"):
            draw_sheet(np.zeros(shape, dtype=np.uint8), tmp_path / "sheet.png")
