"""English that is on every machine: the docstrings of installed packages, one document per module.

The demo falls back on them where no route to a corpus answers. Sources are parsed, never imported; the same installed
versions give the same bytes.
"""

import ast
import importlib.util
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write

PACKAGES = ("numpy", "scipy", "torch", "transformers")
_MEGABYTES_EACH = 1.5
_SHORTEST = 400  # characters: shorter modules are skipped
_LONGEST_SOURCE = 400_000  # bytes: longer sources are generated tables


def docstrings_corpus(into: Path, *, megabytes_each: float = _MEGABYTES_EACH) -> Path:
    """Write ``docstrings.jsonl`` into a folder, one module per line, up to a number of megabytes per package."""
    path = into / "docstrings.jsonl"
    told: set[str] = set()
    count = 0
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for package in PACKAGES:
            room = megabytes_each * 1e6
            for module, text in _documents(package, told):
                if (room := room - len(text.encode())) < 0:
                    break
                file.write(json.dumps({"module": module, "text": text}, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise UserError(f"none of {', '.join(PACKAGES)} is installed with its sources: give a text of your own")
    return path


def _documents(package: str, told: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules of a package with their docstrings, by name, without repetitions."""
    spec = importlib.util.find_spec(package)
    for root in map(Path, (spec.submodule_search_locations if spec else None) or ()):
        for source in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            place = source.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".")
            if "tests" in source.parts or source.stat().st_size > _LONGEST_SOURCE:
                continue
            new = [text for text in _docstrings(source) if text not in told]
            told.update(new)
            document = "\n\n".join(new)
            if len(document) >= _SHORTEST:
                yield place, document


def _docstrings(source: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in other people's strings
            tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return []
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    texts = (ast.get_docstring(node) for node in nodes)
    return list(dict.fromkeys(text for text in texts if text))
