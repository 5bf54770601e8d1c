"""Energies by kind: a new energy is its module, one line here, and one row in the contract tests.

Modules are imported when a kind is asked for. ``AnyEnergy`` is the union of all settings, from which a recipe chooses
by ``kind``; ``PartEnergy`` is the union of those that can be parts of a product. A folder names the kind of the energy
that was saved in it; such an energy can be a part of another one, and then stays as it is (``SavedEnergy``).
"""

from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from freenergy.core.device import device
from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, file_hash, intact, read_json
from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Tokenizer
from freenergy.energies.features import CONFIG
from freenergy.energies.module import EnergyModule
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit

ENERGIES = {  # module, settings, and the energy that they build
    "unit": ("unit", "UnitEnergy", "Unit"),
    "bit": ("bit", "BitEnergy", "Bit"),
    "log-ratio": ("log_ratio", "LogRatioEnergy", "LogRatio"),
    "probe": ("probe", "ProbeEnergy", "Probe"),
    "ngram": ("ngram_features", "NgramEnergy", "NgramFeatures"),
    "repetition": ("repetition", "RepetitionEnergy", "Repetition"),
    "second-lm": ("second_lm", "SecondLMEnergy", "SecondLM"),
    "logits": ("logits", "LogitsEnergy", "Logits"),
    "saved": ("registry", "SavedEnergy", ""),  # what was saved has a kind of its own
    "product": ("product", "ProductEnergy", "Product"),
}

LOADED = {
    "discrete": ("discrete", "Discrete"),
    "mixed": ("mixed", "Mixed"),
}  # fitted by another family, and loaded here

if TYPE_CHECKING:
    AnyEnergy = EnergySettings
    PartEnergy = EnergySettings


@cache
def settings_class(kind: str) -> type[EnergySettings]:
    """Return the settings of this kind of energy."""
    if kind not in ENERGIES:
        raise UserError(f"there is no energy of kind {kind!r}: choose one of {', '.join(ENERGIES)}")
    module, name, _ = ENERGIES[kind]
    found: type[EnergySettings] = getattr(import_module(f"freenergy.energies.{module}"), name)
    return found


def load_energy(folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> EnergyModule:
    """Load the energy in ``folder``, for the language model and the tokenizer that it was trained for."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f"there is no energy in {folder}: give a folder that an energy's save_pretrained has made")
    kind = read_json(folder / CONFIG).get("kind")
    module, name = LOADED.get(str(kind)) or ENERGIES.get(str(kind), ("", "", ""))[::2]
    if not name:
        raise UserError(f"{folder / CONFIG} names an energy of kind {kind!r}: train it again with this version")
    with corruption_as_user_error(folder, "train it again, or copy the whole folder from where it was made"):
        found: type[EnergyModule] = getattr(import_module(f"freenergy.energies.{module}"), name)
        intact(folder)
        return found.from_pretrained(folder, base=base, tokenizer=tokenizer).eval().to(device())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEnergy(EnergySettings):
    """An energy that was trained before, kept as it is."""

    fit: ClassVar[Fit] = "none"
    kind: Literal["saved"] = "saved"
    path: str

    def build(self, inputs: BuildInputs) -> EnergyModule:
        """Load it; it does not learn."""
        energy = load_energy(self.path, base=inputs.base, tokenizer=inputs.corpus.tokenizer)
        return energy.requires_grad_(False)

    def report(self) -> dict[str, Any]:
        """Return its folder too."""
        return {"kind": self.kind, "path": self.path}

    def fingerprints(self, stage: Path, progress: Progress) -> list[str]:
        """Hash all its files; refuse a folder that is missing, or that the stage which reads it would clear."""
        path = Path(self.path)
        if not (path / CONFIG).is_file():
            raise UserError(f"there is no energy in {path} (a saved part): give a folder that has {CONFIG} in it")
        if path.resolve().is_relative_to(stage.resolve()):
            raise UserError(
                f"the saved part {path} lies in the folder that this run trains in: copy it elsewhere first"
            )
        return [file_hash(file) for file in sorted(path.rglob("*")) if file.is_file()]


def __getattr__(name: str) -> Any:
    if name == "AnyEnergy":
        return reduce(or_, map(settings_class, ENERGIES))
    if name == "PartEnergy":
        return reduce(or_, (settings_class(kind) for kind in ENERGIES if kind != "product"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
