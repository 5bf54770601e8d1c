"""From the settings of a source to the source, and the files that it depends on."""

import sys
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash
from freenergy.core.registry import imported
from freenergy.lm.sources.command import FromCommand
from freenergy.lm.sources.endpoint import FromEndpoint
from freenergy.lm.sources.function import FromFunction
from freenergy.lm.sources.pool import read_pool
from freenergy.lm.sources.protocol import TextSource
from freenergy.lm.sources.settings import CommandSource, EndpointSource, FunctionSource, PoolSource, SourceSettings
from freenergy.lm.sources.trust import check_trusted

POOL = "pool.jsonl"  # what the copy of a pool is called in a run
_KINDS = {"command": CommandSource, "function": FunctionSource, "pool": PoolSource, "endpoint": EndpointSource}


def load_source(settings: SourceSettings) -> TextSource:
    """Return the source; a program is started, and a function imported, when the first text is asked for."""
    match settings:
        case CommandSource():
            return FromCommand(settings)
        case FunctionSource(function=name):
            return FromFunction(partial(_call, name), name)
        case PoolSource(path=path):
            return read_pool(Path(path))
        case EndpointSource():
            return FromEndpoint(settings)


def source_settings(record: dict[str, Any]) -> SourceSettings:
    """Return the settings that a record of a run holds."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    kind = str(given.get("kind"))
    if kind not in _KINDS:
        raise UserError(f"the record names a source of kind {kind!r}: run the base stage again")
    found: SourceSettings = _KINDS[kind](**given)
    return found


def source_record(settings: SourceSettings) -> dict[str, Any]:
    """Return the settings as JSON-like values; the pool's own file is beside the record."""
    return {**asdict(settings), **({"path": POOL} if isinstance(settings, PoolSource) else {})}


def source_files(settings: SourceSettings) -> list[str]:
    """Return the hashes of the files that decide what a source writes, as far as its settings name them."""
    paths: list[Path] = []
    match settings:
        case CommandSource(command=command):
            paths = [Path(word) for word in command]
        case PoolSource(path=path):
            paths = [Path(path)]
        case FunctionSource(function=name):
            paths = _module_file(name.partition(":")[0])
    return [file_hash(path) for path in paths if path.is_file()]


def _module_file(module: str) -> list[Path]:
    """Return where a module that is not in a package would be loaded from; packages are not imported to look."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return [Path(loaded.__file__)] if loaded.__file__ else []
    spec = find_spec(module) if "." not in module else None
    return [Path(spec.origin)] if spec is not None and spec.origin else []


@cache
def _function(name: str) -> Any:
    return imported(name)


def _call(name: str, prefix: str, seed: int) -> str:
    check_trusted(f"the function {name}")
    text: str = _function(name)(prefix, seed)
    return text
