"""From the name of a language model to the model: the small file that a run keeps, and the way back from it.

    base.json = {"kind": a name of LANGUAGE_MODELS, …}        what else is in it is the model's own affair

A new kind is its module, one line here and a contract row. ``TabularLM``, for tests and examples, is not saved.
"""

from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from filelock import FileLock

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, file_hash, read_json, write_json
from freenergy.core.progress import SILENT, Progress
from freenergy.core.registry import Registry
from freenergy.core.roles import LanguageModel
from freenergy.corpus.resources import cache_folder, locate
from freenergy.corpus.tokenizer import Tokenizer

RECORD = "base.json"


@runtime_checkable
class PersistentLM(LanguageModel, Protocol):
    """A language model that can be saved to a folder and loaded from it."""

    kind: ClassVar[str]
    record_keys: ClassVar[tuple[str, ...]]  # what ``base.json`` must hold besides the kind

    def write(self, folder: Path) -> dict[str, Any]:
        """Write what it needs into ``folder``; return the rest of ``base.json``."""

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "PersistentLM":
        """Load it from ``folder``, whose ``base.json`` is ``record``."""


LANGUAGE_MODELS = Registry[PersistentLM](
    "language model",
    {
        "ngram": "freenergy.lm.ngram:NgramLM",
        "huggingface": "freenergy.lm.huggingface:HuggingFaceLM",
        "remote": "freenergy.lm.remote:RemoteLM",
        "adapted": "freenergy.lm.adapted:AdaptedLM",
        "samples": "freenergy.lm.samples:SamplesLM",
    },
)


def locate_model(name: str, progress: Progress = SILENT) -> Path:
    """Return the checkpoint folder of a resource, hub id or path; a GGUF file is de-quantised once, into the cache."""
    path = locate(name, progress)
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(ggufs) != 1 or (path / "config.json").is_file():
        return path
    folder = cache_folder() / "converted" / f"{ggufs[0].stem}-{file_hash(ggufs[0])[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not (folder / "config.json").is_file():
            from freenergy.lm.checkpoints import convert_gguf

            progress.say(f"de-quantising {ggufs[0].name} to safetensors, once")
            convert_gguf(ggufs[0], folder)
    return folder


def load_lm(folder: Path, tokenizer: Tokenizer) -> LanguageModel:
    """Return the language model that a run's ``base`` stage has left in ``folder``."""
    with corruption_as_user_error(folder, "run the base stage again"):
        record = read_json(folder / RECORD)
        kind: Any = record.get("kind")
        if kind not in LANGUAGE_MODELS:
            raise UserError(f"{folder / RECORD} names a base of kind {kind!r}: run the base stage again")
        found = LANGUAGE_MODELS.find(kind)
        if missing := [key for key in found.record_keys if key not in record]:
            raise UserError(f"{folder / RECORD} does not say {missing[0]}: run the base stage again")
        return found.read(folder, record, tokenizer)


def save_lm(lm: LanguageModel, folder: Path) -> None:
    """Write a language model so that ``load_lm`` finds it in ``folder``; of a served one only its address."""
    if not isinstance(lm, PersistentLM):
        known = ", ".join(LANGUAGE_MODELS.find(kind).__name__ for kind in LANGUAGE_MODELS)
        raise UserError(f"a base of class {type(lm).__name__} cannot be saved: save one of {known}")
    write_json(folder / RECORD, {"kind": lm.kind, **lm.write(folder)})
