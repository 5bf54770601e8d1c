"""freenergy: energy-based models of text.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

The public names and their modules are listed once, in ``__init__.pyi``, which type checkers read too. Each is imported
on first use, so that ``import freenergy`` and the command line start fast.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom)]
_HOMES = {alias.name: str(node.module) for node in _IMPORTS for alias in node.names}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'freenergy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
