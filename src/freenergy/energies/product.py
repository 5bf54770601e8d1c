"""A product of experts: energies add up.

    exp(−E(x)) = Π_i exp(−E_i(x))^{s_i},        E(x) = Σ_i s_i · E_i(x)

Each expert vetoes what it finds unlikely (section 3.3.2 of Ou, 2024). A part may be frozen, so that new ones learn
what it lacks. All scales are 1 unless they are given. A product may be a part of a product.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, overwritable_folder, write_json
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.energies.features import CONFIG, read_settings
from freenergy.energies.module import EnergyModule, Persistent
from freenergy.energies.registry import PartEnergy, load_energy
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit

_KIND = "product"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductEnergy(EnergySettings):
    """A sum of energies, so a product of their factors. Linear parts are fitted together, then networks one by one."""

    fit: ClassVar[Fit] = "none"  # its parts are
    kind: Literal["product"] = "product"
    parts: tuple[PartEnergy, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise UserError('a product needs parts: give at least one, such as {kind = "ngram"}')
        if len(self.parts) < 2 and self.parts[0].kind == "saved":
            raise UserError("a product of one saved energy learns nothing: add a part that learns")

    def build(self, inputs: BuildInputs) -> "Product":
        """Build all parts."""
        return self.combine([part.build(inputs) for part in self.parts])

    def split(self) -> tuple[EnergySettings, ...]:
        """Return the parts."""
        return self.parts

    def combine(self, parts: Sequence[EnergyModule]) -> "Product":
        """Add the parts up."""
        return Product(parts)


@final
class Product(EnergyModule):
    """Σ_i s_i · E_i; ``parts`` are energies that are modules."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        scales: Sequence[float] | None = None,
        *,
        frozen: Sequence[bool] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        num = len(parts)
        self.parts = nn.ModuleList(parts)
        self.scales = tuple(scales) if scales is not None else (1.0,) * num
        self.frozen = tuple(frozen) if frozen is not None else (False,) * num
        self.names = tuple(names) if names is not None else tuple(type(part).__name__ for part in parts)
        if not num or not num == len(self.scales) == len(self.frozen) == len(self.names):
            raise UserError(
                f"a product of {num} energies has {len(self.scales)} scales, {len(self.frozen)} frozen and "
                f"{len(self.names)} names: give at least one energy, and one of each for every energy"
            )
        for part, is_frozen in zip(parts, self.frozen, strict=True):
            if is_frozen:
                part.requires_grad_(False).eval()

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute E(x), float64."""
        return sum(self.energies(x).values(), start=torch.zeros((), dtype=torch.float64))

    def energies(self, x: Continuations) -> dict[str, Float[Tensor, "B N"]]:
        """Compute s_i · E_i(x) of each part, keyed by its number and name."""
        found = {}
        for i, (part, name) in enumerate(zip(self.parts, self.names, strict=True)):
            with torch.no_grad() if self.frozen[i] else nullcontext():
                found[f"{i} {name}"] = self.scales[i] * part(x).double()
        return found

    def terms(self) -> list[tuple[float, nn.Module]]:
        """Return s_i and E_i of each part."""
        return list(zip(self.scales, self.parts, strict=True))

    def train(self, mode: bool = True) -> "Product":
        """Switch to training; frozen parts stay as they are, with dropout off."""
        super().train(mode)
        for part, is_frozen in zip(self.parts, self.frozen, strict=True):
            part.train(mode and not is_frozen)
        return self

    def save_pretrained(self, folder: str | Path) -> None:
        """Write each part in a folder of its own: 0, 1, …"""
        with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
            aside.mkdir()
            for i, part in enumerate(self.parts):
                if not isinstance(part, Persistent):
                    raise UserError(f"the energy {type(part).__name__} has no save_pretrained: give it one, then save")
                part.save_pretrained(aside / str(i))
            settings = {"scales": self.scales, "frozen": self.frozen, "names": self.names}
            write_json(aside / CONFIG, {"kind": _KIND, "settings": settings})

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Product":
        """Read what ``save_pretrained`` wrote."""
        folder = Path(folder)
        settings = read_settings(folder, _KIND)
        parts = [load_energy(folder / str(i), base=base, tokenizer=tokenizer) for i in range(len(settings["scales"]))]
        return cls(parts, settings["scales"], frozen=settings["frozen"], names=settings["names"])
