"""Energies that are linear in frozen features of a continuation.

    E(x) = −w · z(x) − b,      z(x) = clip((φ(x) − μ) / σ, ±10)

φ is fixed, so features are computed once and the fit of w and b is convex (``training.convex``). μ and σ are those of
the features that it was fitted on, and are saved with w and b. The clip keeps one odd value in unseen text from giving
an absurd energy.

Legend: F features.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, fingerprint, intact, overwritable_folder, read_json, write_json
from freenergy.core.sequences import Continuations
from freenergy.energies.module import EnergyModule
from freenergy.energies.settings import EnergySettings

CONFIG, ARRAYS = "energy.json", "energy.safetensors"
_CLIP = 10.0


class FeatureEnergy(EnergyModule):
    """w · φ(x) with a frozen φ that a class below gives; it starts at E = 0."""

    mean: Tensor
    scale: Tensor
    knows_text = False  # True where φ looks the training text up, so that ``leave_self_out`` matters

    def __init__(self, settings: EnergySettings, names: list[str]) -> None:
        super().__init__()
        self.settings = settings
        self.names = names  # one per feature, for people
        self.weight = nn.Parameter(torch.zeros(len(names), dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(len(names), dtype=torch.float64))
        self.register_buffer("scale", torch.ones(len(names), dtype=torch.float64))

    @abstractmethod
    def features(self, x: Continuations, *, leave_self_out: bool = False) -> Float[Tensor, "B N F"]:
        """Compute φ(x), float64; with ``leave_self_out`` x is training text, and its own occurrence does not count."""

    @property
    def fingerprint(self) -> str:
        """Return a name that two energies with the same φ (on the same base) share."""
        return fingerprint(asdict(self.settings))

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute E(x)."""
        return self.energy_of(self.features(x))

    def energy_of(self, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N"]:
        """Compute E of continuations whose features are at hand."""
        z = self.standardised(features.to(self.weight.device)).to(self.weight.dtype)
        return -(z @ self.weight) - self.bias

    def standardised(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows F"]:
        """Compute z, in the precision of the features."""
        mean, scale = (buffer.to(features) for buffer in (self.mean, self.scale))
        return (features - mean).div_(scale).clamp_(-_CLIP, _CLIP)  # one copy: features fill the memory

    def fit_scale(self, pieces: Iterable[Tensor]) -> None:
        """Set μ and σ to those of all pieces, which are iterated twice; a feature that never changes gets σ = 1."""
        num, total = 0, torch.zeros_like(self.mean)
        for part in pieces:
            num += part.shape[0] * part.shape[1]
            total += part.sum((0, 1), dtype=torch.float64).to(total)
        mean, squares = total / num, torch.zeros_like(self.mean)
        for part in pieces:
            squares += (part - mean.to(part)).square_().sum((0, 1), dtype=torch.float64).to(total)
        scale = (squares / num).sqrt()
        is_constant = scale <= 1e-9 * (1 + mean.abs())
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(is_constant, 1.0, scale))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all."""
        with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
            aside.mkdir()
            save_file({name: value.contiguous() for name, value in self.state_dict().items()}, aside / ARRAYS)
            self._save_more(aside)
            settings = asdict(self.settings)
            write_json(aside / CONFIG, {"kind": settings["kind"], "settings": settings, "names": self.names})

    def _save_more(self, folder: Path) -> None:
        """Write what φ needs besides the settings."""

    def _restore(self, folder: Path) -> None:
        """Read w, b, μ and σ."""
        path = folder / ARRAYS
        try:
            self.load_state_dict(load_file(intact(path)))
        except FileNotFoundError:
            raise UserError(f"there is no file {path}: copy the whole folder of the energy") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): train the energy again, or copy its folder again") from None
        except RuntimeError:
            raise UserError(
                f"{path} does not fit the energy that {CONFIG} and the base describe: give the base that it was "
                "trained with"
            ) from None


def read_settings(folder: Path, kind: str) -> dict[str, Any]:
    """Return the settings that ``energy.json`` holds, lists as tuples, once their kind is checked."""
    config = read_json(folder / CONFIG)
    if config.get("kind") != kind or not isinstance(config.get("settings"), dict):
        raise UserError(
            f"{folder / CONFIG} describes an energy of kind {config.get('kind')!r}, not {kind!r}: give its folder"
        )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config["settings"].items()}
