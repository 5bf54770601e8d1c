"""An energy that was trained before and stays as it is: a folder that another run, or ``save_pretrained``, has left."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Tokenizer
from freenergy.energies.load import RECORD, load_energy
from freenergy.energies.module import EnergyModule
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit


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

    @staticmethod
    def load(folder: Path, *, base: LanguageModel, tokenizer: Tokenizer) -> EnergyModule:
        """Refuse: what is saved has a kind of its own."""
        raise UserError(f"{folder / RECORD} does not name the kind of the energy that was saved: train it again")

    def report(self) -> dict[str, Any]:
        """Return its folder too."""
        return {"kind": self.kind, "path": self.path}

    def fingerprints(self, stage: Path, progress: Progress) -> list[str]:
        """Hash all its files; refuse a folder that is missing, or that the stage which reads it would clear."""
        path = Path(self.path)
        if not (path / RECORD).is_file():
            raise UserError(f"there is no energy in {path} (a saved part): give a folder that has {RECORD} in it")
        if path.resolve().is_relative_to(stage.resolve()):
            raise UserError(
                f"the saved part {path} lies in the folder that this run trains in: copy it elsewhere first"
            )
        return [file_hash(file) for file in sorted(path.rglob("*")) if file.is_file()]
