"""From the name of a language model to the model: the small file that a run keeps, and the way back from it."""

from pathlib import Path

from filelock import FileLock

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, file_hash, read_json, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.roles import LanguageModel
from freenergy.corpus.resources import cache_folder, locate
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.registry import LANGUAGE_MODELS, PersistentLM, language_model_class

RECORD = "base.json"
_SILENT = Silent()


def locate_model(name: str, progress: Progress = _SILENT) -> Path:
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
        return _loaded(folder, tokenizer)


def _loaded(folder: Path, tokenizer: Tokenizer) -> LanguageModel:
    record = read_json(folder / RECORD)
    kind = record.get("kind")
    if kind not in LANGUAGE_MODELS:
        raise UserError(f"{folder / RECORD} names a base of kind {kind!r}: run the base stage again")
    found: type[PersistentLM] = language_model_class(kind)
    if missing := [key for key in found.record_keys if key not in record]:
        raise UserError(f"{folder / RECORD} does not say {missing[0]}: run the base stage again")
    return found.read(folder, record, tokenizer)


def save_lm(lm: LanguageModel, folder: Path) -> None:
    """Write a language model so that ``load_lm`` finds it in ``folder``; of a served one only its address."""
    if not isinstance(lm, PersistentLM):
        known = ", ".join(name.partition(":")[2] for name in LANGUAGE_MODELS.values())
        raise UserError(f"a base of class {type(lm).__name__} cannot be saved: save one of {known}")
    write_json(folder / RECORD, {"kind": lm.kind, **lm.write(folder)})
