"""Family ``images``: a PixelCNN learns images pixel by pixel; bits per dimension and drawn images.

    base → measurement

    bits/dim = − log q(x) / (pixels · ln 2),      the mean over images

A pixel counts once for each of its channels. Two networks are compared on the same images: d_i = the difference of
image i, averaged over the seeds, and its mean has the t interval over images; what another training would give is told
by the seeds' own means, with their t interval.

The energy of a whole image (E-ARM, Eq. 4, at the last pixel) is a number of that pixel's receptive field. In images of
digits it is the empty corner, so no figure "resampled" is made of it.

The presets "paper" are the published sizes. PixelCNN: 15 layers, h = 128, and before the logits 32 maps on
MNIST and 1024 on CIFAR-10 (van den Oord, Kalchbrenner, Kavukcuoglu 2016, Pixel Recurrent Neural Networks, section 5).
Gated PixelCNN: 20 layers of 384 maps, 5 × 5, which is the network of its section on ImageNet; for other images its
paper gives no sizes (van den Oord et al. 2016, Conditional Image Generation with PixelCNN Decoders). The presets
"small" are for a processor of a few cores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from freenergy.apps.images.data import Binarise, ImageData, as_tokens, read_images
from freenergy.apps.images.gated_pixelcnn import GatedPixelCNN
from freenergy.apps.images.pixelcnn import ImageShape, PixelCNN, PixelModule, PixelNetwork
from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement, measured_rate
from freenergy.lm.networks.causal import inference
from freenergy.lm.networks.protocol import Network
from freenergy.recipes.families.network import Domain, NetworkRecipe, learning, measuring
from freenergy.runs.run import Run, Stage
from freenergy.training.settings import TrainedNetwork

NATS, SAMPLES = "nats.safetensors", "samples.safetensors"
_ROWS = 100  # images at a time


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


@final
class Images(Domain):
    """The images of the settings, and the network that learns them."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        training, test = read_images(Path(settings.path).expanduser())
        count, height, width, channels = training.shape
        if settings.validation >= count:
            raise UserError(
                f"validation = {settings.validation} holds out all of the {count} training images: set it lower"
            )
        levels = 256 if settings.binarise == "none" else 2
        self.shape = ImageShape(height=height, width=width, channels=channels, levels=levels)
        rng = Rng(settings.binarise_seed).child("binarise")
        train = as_tokens(training, settings.binarise, rng.child("train"))
        self.train, held_out = train[: -settings.validation], train[-settings.validation :]
        self.held_out = held_out[: settings.validation_images]
        self.test = as_tokens(test[: settings.test_images], settings.binarise, rng.child("test"))

    def network(self, rng: Rng) -> PixelNetwork:
        """A network with fresh weights."""
        with torch.random.fork_rng():
            torch.manual_seed(rng.integer())
            return PixelNetwork(build_module(self.settings, self.shape))

    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> ImageData:
        """Rows to train on."""
        return ImageData(
            self.train, self.held_out, batch_size=batch_size, accumulate=accumulate, fake=self.settings.fake, rng=rng
        )

    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """Bits per dimension of test and training images; keeps the nats of each image, and images drawn from q."""
        splits = {"test": self.test, "train": self.train[: self.settings.train_images]}
        nats = {name: nats_of(network, rows, progress, f"bits/dim {name}") for name, rows in splits.items()}
        with atomic_write(folder / NATS) as aside:
            save_file(nats, aside)
        with progress.track("drawing images", self.settings.sheet, "images") as advance:
            samples = self._drawn(network, rng.child("sheet"))
            advance(len(samples))
        with atomic_write(folder / SAMPLES) as aside:
            save_file({"samples": samples}, aside)
        found = {f"bits/dim {name}": self._bits(values.mean().item()) for name, values in nats.items()}
        return {**found, "nats/image test": nats["test"].mean().item()}

    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """Bits per dimension, ours − others, over images; the engine tells the spread over seeds."""
        found = dict[str, Measurement]()
        for split in ("test", "train"):
            a, b = (np.stack([_read_nats(folder, split) for folder in folders]) for folders in (ours, others))
            if a.shape != b.shape:
                raise UserError(
                    f"{ours[0]} and {others[0]} measured other images or seeds ({a.shape} and {b.shape}): "
                    "measure both with the same settings"
                )
            d = (a - b) * self._bits(1.0)  # [seeds, images]
            found[f"bits/dim {split}"] = measured_rate(d.mean(0), np.ones(d.shape[1]))
        return found

    def _bits(self, nats: float) -> float:
        return nats / (self.shape.tokens * math.log(2))

    def _drawn(self, network: Network, rng: Rng) -> UInt8[Tensor, "images height width channels"]:
        """Images drawn from q, from black to white."""
        s, n = self.shape, self.settings.sheet
        tokens, _ = network.draw(None, torch.zeros(n, 0, dtype=torch.long), s.tokens, rng)
        shades = (tokens.cpu() * 255).div(s.levels - 1, rounding_mode="floor")
        return shades.to(torch.uint8).view(n, s.height, s.width, s.channels).contiguous()


def nats_of(
    network: Network, rows: UInt8[Tensor, "images pixels"], progress: Progress, label: str
) -> Float[Tensor, " images"]:
    """− log q(x) of each image, float64."""
    device, found = next(network.module.parameters()).device, []
    with inference(network.module), torch.no_grad(), progress.track(label, len(rows), "images") as advance:
        for part in rows.split(_ROWS):
            tokens = part.long().to(device)
            logits = network.logits(None, tokens)
            nats = cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
            found.append(nats.double().sum(1).cpu())
            advance(len(part))
    return torch.cat(found)


def _read_nats(folder: Path, split: str) -> Float[np.ndarray, " images"]:
    path = folder / NATS
    with corruption_as_user_error(path, "measure that network again"):
        return np.asarray(load_file(path)[split].numpy())


_opened = lru_cache(maxsize=1)(Images)


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
