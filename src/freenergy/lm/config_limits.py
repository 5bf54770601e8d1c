"""A stranger's checkpoint before anything is built from it: sizes that no model has, and names of files elsewhere.

``config.json`` decides how much is allocated, and ``model.safetensors.index.json`` which files are read.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import read_json

_INDEX = "model.safetensors.index.json"
_LIMITS = {  # by the end of a setting's name; far beyond any model that fits a machine
    "layers": 1000,
    "n_layer": 1000,
    "heads": 10_000,
    "experts": 10_000,
    "hidden_size": 2**18,
    "n_embd": 2**18,
    "d_model": 2**18,
    "intermediate_size": 2**21,
    "head_dim": 2**14,
    "vocab_size": 2**23,
    "position_embeddings": 2**26,
}


def check_config(folder: Path) -> None:
    """Raise ``UserError`` if a checkpoint's config or index would take any amount of memory, or files elsewhere."""
    if (folder / "config.json").is_file():
        for name, value in _settings(read_json(folder / "config.json")):
            most = next((limit for end, limit in _LIMITS.items() if name.endswith(end)), None)
            if most is not None and isinstance(value, int) and not 0 <= value <= most:
                raise UserError(
                    f"{folder / 'config.json'} has {name} = {value}, beyond {most}: it is damaged or not to be "
                    "trusted, so fetch the checkpoint again"
                )
    if (folder / _INDEX).is_file():
        _check_index(folder / _INDEX)


def _settings(config: dict[str, Any], depth: int = 0) -> list[tuple[str, Any]]:
    found = list(config.items())
    for value in config.values():
        if isinstance(value, dict) and depth < 3:
            found += _settings(value, depth + 1)
    return found


def _check_index(path: Path) -> None:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{path} has no weight_map: fetch the checkpoint again")
    for name in set(map(str, names.values())):
        if len(PurePosixPath(name).parts) != 1 or name in ("", ".", ".."):
            raise UserError(f"{path} names {name[:80]!r}, a file outside of its folder: do not trust this checkpoint")
