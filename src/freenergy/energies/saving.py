"""The folder of an energy that is a network: what it is, how its network looks, and its weights.

    energy.json   energy.safetensors   trunk/config.json

The weights are in one file by the module's own names; the network is built from its config and filled.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, overwritable_folder, read_json, write_json
from freenergy.core.roles import LanguageModel
from freenergy.energies.features import ARRAYS, CONFIG
from freenergy.energies.settings import EnergySettings
from freenergy.lm.activations import NetworkLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRUNK = "trunk"


@contextmanager
def saved(
    folder: str | Path, module: nn.Module, settings: EnergySettings, network: "PreTrainedModel", **more: Any
) -> Iterator[Path]:
    """Write the folder completely or not at all; within the block other files can be added."""
    with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
        aside.mkdir()
        network.config.save_pretrained(aside / _TRUNK)
        save_model(module, str(aside / ARRAYS))
        record = {"kind": settings.kind, "settings": asdict(settings), "dtype": str(network.dtype).split(".")[1]}
        write_json(aside / CONFIG, record | more)
        yield aside


def read_record(folder: str | Path) -> dict[str, Any]:
    """Read ``energy.json``."""
    return read_json(Path(folder) / CONFIG)


def rebuilt(folder: str | Path, *, with_head: bool = False) -> "PreTrainedModel":
    """Return the network of a saved energy, with weights that are still to be filled."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    path = Path(folder) / _TRUNK
    if not (path / "config.json").is_file():
        raise UserError(f"{folder} lacks {_TRUNK}/config.json: it is not a complete energy; train it again")
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    dtype = getattr(torch, read_record(folder)["dtype"])
    with torch.random.fork_rng():  # the weights that are drawn here are overwritten
        kind: Any = AutoModelForCausalLM if with_head else AutoModel
        network: PreTrainedModel = kind.from_config(config, dtype=dtype)
    return headless(network)


def fill(folder: str | Path, module: nn.Module) -> None:
    """Put the saved weights in place; every one of them must be there."""
    path = Path(folder) / ARRAYS
    try:
        load_model(module, path)
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path} does not hold the weights of this energy ({reason}): train it again") from error


def network_of(base: LanguageModel, kind: str) -> "PreTrainedModel":
    """Return the base's network with its head, which an energy of this kind reads or starts as a copy of."""
    if not isinstance(base, NetworkLM):
        raise UserError(
            f"an energy of kind {kind!r} reads the base's network, and a {type(base).__name__} has no network: "
            'take a base with one, or energy.kind = "ngram", or a bit with start = "encoder" or "scratch"'
        )
    return base.model


def copied(network: "PreTrainedModel") -> "PreTrainedModel":
    """Copy a network; the copy learns."""
    return copy.deepcopy(network).requires_grad_(True)


def without_head(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the part of a model that computes its states."""
    return cast("PreTrainedModel", model.base_model)


@torch.no_grad()
def linear_head(model: "PreTrainedModel") -> nn.Module | None:
    """Return the layer that makes the logits of the last states; None where the model does more to its states."""
    V, head = model.config.get_text_config().vocab_size, model.get_output_embeddings()
    tokens = torch.tensor([[(997 * i + 17) % V for i in range(4)]], device=model.device)
    if not isinstance(head, nn.Module):
        return None
    found = head(without_head(model)(tokens, use_cache=False).last_hidden_state)
    wanted = model(tokens, use_cache=False).logits
    is_all = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=1e-3)
    return head if is_all else None


def headless(network: "PreTrainedModel") -> "PreTrainedModel":
    """Remove the layer that some encoders put on their first state, which no energy reads."""
    if getattr(network, "pooler", None) is not None:
        network.pooler = None  # type: ignore[assignment]
    return network
