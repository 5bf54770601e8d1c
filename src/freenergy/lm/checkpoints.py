"""Checkpoints of causal language models, in and out: safetensors or GGUF, never pickle, never remote code."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from freenergy.core.device import device as chosen_device
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, file_hash, fingerprint, intact, read_json
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.config_limits import check_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_checkpoint(path: Path, *, device: str | torch.device | None = None) -> tuple[PreTrainedModel, int]:
    """Return the model in float32 and its EOS token; on the device that was chosen, unless another is given."""
    folder, gguf = _parts(intact(path))
    check_config(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    if gguf:
        options |= {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)}
    else:
        options["use_safetensors"] = True
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # for a bad config the library may raise anything
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{path} does not load as a causal language model ({reason}): "
            "it is truncated, of another format or of an unknown architecture; fetch or train it again"
        ) from error
    model: Any
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise UserError(
            f"{path} lacks {len(lost)} of the weights that its config names (the first is {lost[0]}): "
            "the checkpoint is truncated or of another architecture; fetch or train it again"
        )
    model = _dense(model) if gguf else model
    _check_numbers(model, path)
    model.to(chosen_device() if device is None else device)
    return model, _eos(model, path)


def _check_numbers(model: PreTrainedModel, path: Path) -> None:
    """Refuse weights that are not numbers: every prediction would be NaN, and errors would name other causes."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"the weight {name} of {path} has a NaN or an infinity: fetch or train it again")


def _dense(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights without the memory of having been quantised, which would keep them from being saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights():
        dense: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dense.load_state_dict(model.state_dict(), assign=True)  # neither drawn at random nor copied
    dense.tie_weights()
    return dense


def _parts(path: Path) -> tuple[Path, str | None]:
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}: give a folder with config.json, or a .gguf file")
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file():
        return path, None
    if len(ggufs) == 1:
        return path, ggufs[0].name
    raise UserError(f"{path} is not a checkpoint: it has no config.json and {len(ggufs)} GGUF files; name one file")


def _eos(model: PreTrainedModel, path: Path) -> int:
    for config in (model.config.get_text_config(), model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int):
            return eos
    raise UserError(f"the config of {path} names no eos_token_id: add it, or pass eos=")


def save_checkpoint(model: PreTrainedModel, folder: Path, *, eos: int, tokenizer: Tokenizer | None = None) -> None:
    """Write config and safetensors (and the tokenizer, where given), completely or not at all."""
    model.config.eos_token_id = eos
    if model.generation_config is not None:
        model.generation_config.eos_token_id = eos
    with atomic_write(folder) as aside:
        model.save_pretrained(aside, safe_serialization=True)
        if tokenizer is not None:
            tokenizer.save(aside)


def convert_gguf(path: Path, folder: Path) -> None:
    """De-quantise a GGUF file once, into a checkpoint folder of float32 safetensors with its tokenizer."""
    model, eos = load_checkpoint(path, device="cpu")
    parent, gguf = _parts(path)
    save_checkpoint(model, folder, eos=eos, tokenizer=Tokenizer.from_pretrained(parent / (gguf or "")))


def has_tokenizer(path: Path) -> bool:
    """Return whether a checkpoint's folder holds its tokenizer."""
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def check_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse a checkpoint that reads other tokens than the corpus was made of."""
    if has_tokenizer(path):
        own = Tokenizer.from_pretrained(path)
        if own.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"the tokenizer of the corpus ({tokenizer.fingerprint}) is not that of the checkpoint {path} "
                f'({own.fingerprint}): set tokenizer.kind = "pretrained" and tokenizer.path = "{path}"'
            )
    elif (path / "config.json").is_file():
        vocab_size = read_json(path / "config.json").get("vocab_size")
        if isinstance(vocab_size, int) and vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the checkpoint {path} knows only {vocab_size}: "
                "use the tokenizer that the checkpoint was trained with"
            )


def checked_path(folder: Path, record: dict[str, Any]) -> Path:
    """Return the checkpoint that a run's record names; one outside of the run must still be what it was."""
    path = folder / str(record["path"])
    if Path(record["path"]).is_absolute() and checkpoint_fingerprint(path) != record.get("fingerprint"):
        raise UserError(f"{path} is not the checkpoint that the run was made with: fetch it again, or run it again")
    return path


def is_padded(path: Path) -> bool:
    """Whether a checkpoint's embedding has more rows than its tokenizer has tokens."""
    if not (path.is_dir() and has_tokenizer(path) and (path / "config.json").is_file()):
        return False
    rows = read_json(path / "config.json").get("vocab_size")
    return isinstance(rows, int) and rows > Tokenizer.from_pretrained(path).vocab_size


def checkpoint_fingerprint(path: Path) -> str:
    """Name a checkpoint by its weights and its config."""
    folder, gguf = _parts(path)
    files = [folder / gguf] if gguf else [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return fingerprint([file_hash(file) for file in files])
