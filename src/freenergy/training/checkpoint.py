"""The state of a training run in one file that is whole or absent.

Weights, Adam's moments and the loop's few numbers go into one safetensors file, the numbers as JSON in its metadata, so
that no two files can disagree. Randomness needs no saving: every step draws from a stream named by its number.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from freenergy.errors import UserError
from freenergy.storage import whole
from freenergy.training.average import Average


@final
@dataclass(slots=True)
class TrainingState:
    """Where a run is: what the loop carries from step to step besides weights and moments."""

    step: int = 0
    best_value: float = float("inf")
    validations_since_best: int = 0


def save(
    path: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    state: TrainingState,
    carried: Mapping[str, Tensor],
) -> None:
    """Write everything that the next step needs; ``carried`` is the task's own state."""
    tensors = {f"weight.{name}": weight.detach() for name, weight in module.named_parameters()}
    for name, weight in module.named_parameters():
        for key, moment in optimiser.state.get(weight, {}).items():
            tensors[f"optimiser.{key}.{name}"] = torch.as_tensor(moment)
    tensors |= {f"average.{name}": weight for name, weight in average.tensors.items()}
    tensors |= {f"state.{name}": tensor for name, tensor in carried.items()}
    with whole(path) as aside:
        save_file(_contiguous(tensors), aside, metadata={"state": json.dumps(asdict(state))})


def restore(
    path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, average: Average, carried: Mapping[str, Tensor]
) -> TrainingState:
    """Put weights and moments back in place; the loop's numbers are returned."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = TrainingState(**json.loads(file.metadata()["state"]))
        _fill(tensors, module, optimiser)
        average.tensors = {name: tensors[f"average.{name}"].to(w.device) for name, w in average.tensors.items()}
        for name, tensor in carried.items():
            tensor.copy_(tensors[f"state.{name}"])
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"the checkpoint {path} does not belong to this model or is damaged ({type(error).__name__}): "
            "delete it to train from the start"
        ) from error
    return state


def _fill(tensors: dict[str, Tensor], module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(tensors[f"weight.{name}"])
            moments = {
                key: tensors[f"optimiser.{key}.{name}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"optimiser.{key}.{name}" in tensors
            }
            if moments:
                optimiser.state[weight] = {
                    key: moment.to(weight.device if key != "step" else "cpu") for key, moment in moments.items()
                }


def save_weights(path: Path, module: nn.Module) -> None:
    """Write the weights alone."""
    with whole(path) as aside:
        save_file(_contiguous({name: weight.detach() for name, weight in module.named_parameters()}), aside)


def restore_weights(path: Path, module: nn.Module) -> None:
    """Read the weights alone."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(file.get_tensor(name))


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
