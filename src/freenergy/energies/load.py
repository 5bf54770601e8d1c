"""From a folder to the energy that was saved in it."""

from pathlib import Path

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, read_json
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Tokenizer
from freenergy.energies.features import CONFIG
from freenergy.energies.module import EnergyModule
from freenergy.energies.registry import ENERGIES, settings_class

RECORD = CONFIG


def load_energy(folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> EnergyModule:
    """Load the energy in ``folder``, for the language model and the tokenizer that it was trained for."""
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise UserError(f"there is no energy in {folder}: give a folder that an energy's save_pretrained has made")
    kind = read_json(folder / RECORD).get("kind")
    if not isinstance(kind, str) or kind not in ENERGIES:
        raise UserError(f"{folder / RECORD} names an energy of kind {kind!r}: train it again with this version")
    with corruption_as_user_error(folder, "train it again, or copy the whole folder from where it was made"):
        return settings_class(kind).load(folder, base=base, tokenizer=tokenizer).eval()
