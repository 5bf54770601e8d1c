"""Images, pixel by pixel: reading them, rows for training, and bits per dimension."""

from freenergy.apps.images.settings import ImageSubject
from freenergy.apps.images.subject import Images, open_images

__all__ = ["ImageSubject", "Images", "open_images"]
