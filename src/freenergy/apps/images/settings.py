"""Settings of an experiment on images.

The presets "paper" are the published sizes. PixelCNN: 15 layers, h = 128, and before the logits 32 maps on
MNIST and 1024 on CIFAR-10 (van den Oord, Kalchbrenner, Kavukcuoglu 2016, Pixel Recurrent Neural Networks, section 5).
Gated PixelCNN: 20 layers of 384 maps, 5 × 5, which is the network of its section on ImageNet; for other images its
paper gives no sizes (van den Oord et al. 2016, Conditional Image Generation with PixelCNN Decoders). The presets
"small" are for a processor of a few cores.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from freenergy.apps.images.gated_pixelcnn import GatedPixelCNN
from freenergy.apps.images.pixelcnn import ImageShape, PixelCNN, PixelModule
from freenergy.core.checks import check_range
from freenergy.core.errors import UserError

Binarise = Literal["stochastic", "threshold", "none"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Images in a folder, and the network that learns them.

    ``binarise`` makes pixels black or white: "stochastic" a pixel is 1 with a probability equal to its intensity,
    drawn once from ``binarise_seed``, the same for every row of a table; "threshold" if its intensity is at least half;
    "none" keeps 256 levels. Bits per dimension below one, as published of MNIST, are those of binary images.
    """

    MEASURING: ClassVar[tuple[str, ...]] = ("test_images", "train_images", "sheet")

    path: str = "mnist"  # a folder with the idx files of MNIST or the binary version of CIFAR-10
    network: Literal["pixelcnn", "gated-pixelcnn"] = "pixelcnn"
    preset: Literal["small", "paper"] = "small"
    blocks: int = 0  # layers; 0 leaves them to the preset, as in the next three
    features: int = 0  # h of PixelCNN, p of Gated PixelCNN
    head: int = 0  # maps of the last layers before the logits
    kernel: int = 0  # of Gated PixelCNN
    binarise: Binarise = "stochastic"
    binarise_seed: int = 0
    validation: int = 5000  # last images of the training set, held out
    validation_images: int = 1000  # of these, read at every validation
    test_images: int = 10_000
    train_images: int = 2000  # measured for "bits/dim train"
    sheet: int = 64  # images drawn after training
    fake: int = 56  # pixels of a fake row: K; two rows of MNIST

    def __post_init__(self) -> None:
        check_range(self, "validation", "validation_images", "test_images", "train_images", "sheet", "fake", at_least=1)
        check_range(self, "blocks", "features", "head", "kernel", "binarise_seed", at_least=0)
        if self.network == "pixelcnn" and self.kernel:
            raise UserError(f"kernel is {self.kernel}, but PixelCNN's is always 3: leave it out or use gated-pixelcnn")


def build_module(settings: ImageSettings, shape: ImageShape) -> PixelModule:
    """Build the network, with torch's initial weights; sizes that are not set are the preset's."""
    is_plain = settings.network == "pixelcnn"
    if settings.preset == "small":
        sizes = (5, 32, 32, 3) if is_plain else (4, 32, 32, 3)
    else:
        last = 32 if shape.channels == 1 else 1024
        sizes = (15, 128, last, 3) if is_plain else (20, 384, last, 5)
    own = (settings.blocks, settings.features, settings.head, settings.kernel)
    blocks, features, head, kernel = (mine or preset for mine, preset in zip(own, sizes, strict=True))
    if is_plain:
        return PixelCNN(shape, blocks=blocks, features=features, head=head)
    return GatedPixelCNN(shape, blocks=blocks, features=features, head=head, kernel=kernel)
