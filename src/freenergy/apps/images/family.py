"""Family ``images``: a PixelCNN that learns images pixel by pixel.

base → measurement
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, final

from freenergy.apps.images.domain import Images, open_images
from freenergy.apps.images.settings import ImageSettings
from freenergy.core.progress import Progress, Silent
from freenergy.recipes.families.network import NetworkRecipe, TrainedNetwork, learning, measuring
from freenergy.runs.run import Run, Stage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesRecipe(NetworkRecipe[TrainedNetwork]):
    """A network of pixels on a folder of images."""

    main_column: ClassVar[str] = "bits/dim test"

    family: Literal["images"] = "images"
    images: ImageSettings = field(default_factory=ImageSettings)
    base: TrainedNetwork = field(default_factory=TrainedNetwork)

    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns nothing: images are read in a second."""
        return ()

    def domain(self, run: Run[Any], progress: Progress) -> Images:
        """Returns the images."""
        return _opened(self.images)

    def learning_inputs(self, progress: Progress) -> Any:
        """Returns the sizes of the network and the choice of images."""
        return learning(self.images)

    def measuring_inputs(self) -> Any:
        """Returns what is measured."""
        return measuring(self.images)


@lru_cache(maxsize=1)
def _opened(settings: ImageSettings) -> Images:
    return open_images(settings, Silent())
