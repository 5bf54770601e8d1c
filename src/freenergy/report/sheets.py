"""Draws many small images on one sheet.

sheet = columns × rows of images, a line of paper between them
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib.image import imsave

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write

_PAPER = 128  # grey, so that black and white images both have an edge
_GAP = 1
_NO_METADATA: Any = {"Software": None}  # a version would change the bytes


def draw_sheet(images: UInt8[np.ndarray, "n height width *colours"], path: Path, *, zoom: int = 3) -> None:
    """Write grey images [n, H, W] or [n, H, W, 1] or colour images [n, H, W, 3] as a PNG; a pixel is ``zoom`` wide."""
    if images.ndim == 3:
        images = images[..., None]
    n, height, width, colours = images.shape
    if not n or colours not in (1, 3):
        raise UserError(f"images of shape {images.shape} cannot be drawn: give one or more, grey or RGB")
    columns = math.ceil(math.sqrt(n))
    tall, wide = height + _GAP, width + _GAP
    sheet = np.full((math.ceil(n / columns) * tall + _GAP, columns * wide + _GAP, 3), _PAPER, dtype=np.uint8)
    for k, image in enumerate(images):
        top, left = _GAP + k // columns * tall, _GAP + k % columns * wide
        sheet[top : top + height, left : left + width] = image
    with atomic_write(path) as temporary:
        imsave(temporary, sheet.repeat(zoom, 0).repeat(zoom, 1), format="png", metadata=_NO_METADATA)
