"""From the name of a language model to the model: the small file that a run keeps, and the way back from it."""

import os
from pathlib import Path

from filelock import FileLock

from freenergy.core.errors import UserError
from freenergy.core.files import corruption_as_user_error, file_hash, read_json, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.roles import LanguageModel
from freenergy.corpus.resources import cache_folder, locate
from freenergy.corpus.tokenizer import Tokenizer

RECORD = "base.json"
API_KEY = "FREENERGY_API_KEY"
_SILENT = Silent()


def locate_model(name: str, progress: Progress = _SILENT) -> Path:
    """The checkpoint folder of a resource, hub id or path; a GGUF file is de-quantised once, into the cache."""
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


def open_base(folder: Path, tokenizer: Tokenizer) -> LanguageModel:
    """The language model that a run's ``base`` stage has left in ``folder``."""
    with corruption_as_user_error(folder, "run the base stage again"):
        return _opened(folder, tokenizer)


def _opened(folder: Path, tokenizer: Tokenizer) -> LanguageModel:
    record = read_json(folder / RECORD)
    needed = {"ngram": "path", "huggingface": "path", "remote": "settings"}.get(str(record.get("kind")), "kind")
    if needed not in record:
        raise UserError(f"{folder / RECORD} does not say {needed}: run the base stage again")
    match record.get("kind"):
        case "ngram":
            from freenergy.lm.ngram import NgramLM

            return NgramLM.from_pretrained(folder / record["path"])
        case "huggingface":
            from freenergy.lm.huggingface import HuggingFaceLM

            return HuggingFaceLM.from_pretrained(folder / record["path"], eos=tokenizer.eos)
        case "remote":
            from freenergy.lm.remote import RemoteLM

            return RemoteLM(
                vocab_size=tokenizer.vocab_size,
                eos=tokenizer.eos,
                api_key=os.environ.get(API_KEY),
                **{**record["settings"], "stops": tuple(record["settings"]["stops"])},
            )
        case other:
            raise UserError(f"{folder / RECORD} names a base of kind {other!r}: run the base stage again")


def save_base(lm: LanguageModel, folder: Path) -> None:
    """Write a language model so that ``open_base`` finds it in ``folder``; of a served one only its address."""
    match type(lm).__name__:
        case "HuggingFaceLM" | "NgramLM":
            lm.save_pretrained(folder / "base")  # type: ignore[attr-defined]
            kind = "ngram" if type(lm).__name__ == "NgramLM" else "huggingface"
            write_json(folder / RECORD, {"kind": kind, "path": "base"})
        case "RemoteLM":
            names = ("url", "model", "max_length", "most_log_probs", "stops", "timeout_seconds")
            write_json(folder / RECORD, {"kind": "remote", "settings": {name: getattr(lm, name) for name in names}})
        case other:
            raise UserError(f"a base of class {other} cannot be saved: save one of HuggingFaceLM, NgramLM, RemoteLM")
