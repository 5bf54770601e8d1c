"""freenergy: energy-based models of text.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

The names below are the public ones; each is imported when it is first used, so that ``import freenergy`` and the
command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freenergy.base.huggingface import HuggingFaceLM
    from freenergy.base.ngram import NgramLM
    from freenergy.base.remote import RemoteLM
    from freenergy.base.tabular import TabularLM
    from freenergy.config import Recipe, load_recipe
    from freenergy.corpus import Corpus, Tokenizer
    from freenergy.errors import UserError
    from freenergy.evaluation.perplexity import perplexity
    from freenergy.pipeline import Run, load_base, run
    from freenergy.protocols import Draws, Energy, LanguageModel, Truncation
    from freenergy.randomness import Rng
    from freenergy.resources import fetch
    from freenergy.sequences import Continuations, Sequences, SequenceSpace

__version__ = "0.1.0"

_HOMES = {
    "Continuations": "freenergy.sequences",
    "Corpus": "freenergy.corpus",
    "Draws": "freenergy.protocols",
    "Energy": "freenergy.protocols",
    "HuggingFaceLM": "freenergy.base.huggingface",
    "LanguageModel": "freenergy.protocols",
    "NgramLM": "freenergy.base.ngram",
    "Recipe": "freenergy.config",
    "RemoteLM": "freenergy.base.remote",
    "Rng": "freenergy.randomness",
    "Run": "freenergy.pipeline",
    "SequenceSpace": "freenergy.sequences",
    "Sequences": "freenergy.sequences",
    "TabularLM": "freenergy.base.tabular",
    "Tokenizer": "freenergy.corpus",
    "Truncation": "freenergy.protocols",
    "UserError": "freenergy.errors",
    "fetch": "freenergy.resources",
    "load_base": "freenergy.pipeline",
    "load_recipe": "freenergy.config",
    "perplexity": "freenergy.evaluation.perplexity",
    "run": "freenergy.pipeline",
}

__all__ = [
    "Continuations",
    "Corpus",
    "Draws",
    "Energy",
    "HuggingFaceLM",
    "LanguageModel",
    "NgramLM",
    "Recipe",
    "RemoteLM",
    "Rng",
    "Run",
    "SequenceSpace",
    "Sequences",
    "TabularLM",
    "Tokenizer",
    "Truncation",
    "UserError",
    "__version__",
    "fetch",
    "load_base",
    "load_recipe",
    "perplexity",
    "run",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'freenergy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
