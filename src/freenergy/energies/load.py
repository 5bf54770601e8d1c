"""From a folder to the energy that was saved in it."""

from importlib import import_module
from pathlib import Path

from torch import nn

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, read_json
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Tokenizer
from freenergy.energies.features import CONFIG

RECORD = CONFIG
_HOMES = {  # imported when they are needed, since some bring transformers with them
    "unit": ("unit", "Unit"),
    "bit": ("bit", "Bit"),
    "log-ratio": ("log_ratio", "LogRatio"),
    "probe": ("probe", "Probe"),
    "logits": ("logits", "Logits"),
    "ngram": ("ngram_features", "NgramFeatures"),
    "product": ("product", "Product"),
}


def load_energy(folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> nn.Module:
    """The energy in ``folder``, for the language model and the tokenizer that it was trained for."""
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise UserError(f"there is no energy in {folder}: give a folder that an energy's save_pretrained has made")
    kind = read_json(folder / RECORD).get("kind")
    if not isinstance(kind, str) or kind not in _HOMES:
        raise UserError(f"{folder / RECORD} names an energy of kind {kind!r}: train it again with this version")
    module, name = _HOMES[kind]
    home = getattr(import_module(f"freenergy.energies.{module}"), name)
    with corruption_as_user_error(folder, "train it again, or copy the whole folder from where it was made"):
        energy: nn.Module = home.from_pretrained(folder, base=base, tokenizer=tokenizer)
    return energy.eval()
