"""The registry of language models that a folder can hold: a new one is its module, one line here and a contract row.

    base.json = {"kind": a name below, …}        what else is in it is the model's own affair

Modules are imported when a kind is asked for. ``TabularLM``, for tests and examples, is not saved.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from freenergy.core.roles import LanguageModel
from freenergy.corpus.tokenizer import Tokenizer

LANGUAGE_MODELS = {
    "ngram": "ngram:NgramLM",
    "huggingface": "huggingface:HuggingFaceLM",
    "remote": "remote:RemoteLM",
    "adapted": "adapted:AdaptedLM",
    "samples": "samples:SamplesLM",
}


@runtime_checkable
class PersistentLM(LanguageModel, Protocol):
    """A language model that can be saved to a folder and loaded from it."""

    kind: ClassVar[str]
    record_keys: ClassVar[tuple[str, ...]]  # what ``base.json`` must hold besides the kind

    def write(self, folder: Path) -> dict[str, Any]:
        """Write what it needs into ``folder``; return the rest of ``base.json``."""
        ...

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "PersistentLM":
        """Load it from ``folder``, whose ``base.json`` is ``record``."""
        ...


@cache
def language_model_class(kind: str) -> Any:
    """Return the class of this kind, which is a ``type[PersistentLM]``."""
    module, name = LANGUAGE_MODELS[kind].split(":")
    return getattr(import_module(f"freenergy.lm.{module}"), name)
