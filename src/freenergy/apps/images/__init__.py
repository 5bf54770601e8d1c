"""Images, pixel by pixel: reading them, rows for training, and bits per dimension."""

from freenergy.apps.images.domain import Images, open_images
from freenergy.apps.images.settings import ImageSettings

__all__ = ["ImageSettings", "Images", "open_images"]
