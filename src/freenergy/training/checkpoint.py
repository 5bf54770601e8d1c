"""What training carries from step to step, in one file that is complete or absent.

    θ̄ ← d·θ̄ + (1 − d)·θ,    d = min(ema, (1 + step) / (10 + step))        the moving average of the weights

The first steps count less by the second term, so that the average does not stay near the initial weights.

Weights, Adam's moments, the average and the loop's few numbers go into one safetensors file, the numbers as JSON in its
metadata, so that no two files can disagree. Randomness needs no saving: every step draws from a stream named by its
number. The file is the same whatever number of ranks has made it. Weights that are sharded over ranks are gathered one
by one into the memory of the first, which writes; every rank reads them all and keeps its part.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error
from freenergy.training.distributed.ranks import Ranks

_ALONE = Ranks()


@final
@dataclass(slots=True)
class TrainingState:
    """Where a run is: what the loop carries from step to step besides weights and moments."""

    step: int = 0
    best_value: float = float("inf")
    validations_since_best: int = 0


@final
class Average:
    """The exponential moving average of a module's trainable weights; with ``ema`` = 0 the weights themselves."""

    def __init__(self, module: nn.Module, ema: float) -> None:
        self.ema = ema
        self._weights = {name: w for name, w in module.named_parameters() if w.requires_grad} if ema else {}
        self.tensors: dict[str, Tensor] = {name: w.detach().clone() for name, w in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average with the weights after a step."""
        d = min(self.ema, (1 + step) / (10 + step))
        for name, w in self._weights.items():
            self.tensors[name].lerp_(w, 1 - d)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the module holds the average."""
        present = {name: w.detach().clone() for name, w in self._weights.items()}
        self._fill(self.tensors)
        try:
            yield
        finally:
            self._fill(present)

    @torch.no_grad()
    def _fill(self, tensors: dict[str, Tensor]) -> None:
        for name, w in self._weights.items():
            w.copy_(tensors[name])


def save(
    path: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    average: Average,
    state: TrainingState,
    carried: Mapping[str, Tensor],
    ranks: Ranks = _ALONE,
) -> None:
    """Write everything that the next step needs; ``carried`` is the task's own state. All ranks call this."""
    tensors = {f"weight.{name}": weight.detach() for name, weight in module.named_parameters()}
    for name, weight in module.named_parameters():
        for key, moment in optimiser.state.get(weight, {}).items():
            tensors[f"optimiser.{key}.{name}"] = torch.as_tensor(moment)
    tensors |= {f"average.{name}": weight for name, weight in average.tensors.items()}
    tensors |= {f"state.{name}": tensor for name, tensor in carried.items()}
    _write(path, tensors, ranks, {"state": json.dumps(asdict(state))})


def restore(
    path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, average: Average, carried: Mapping[str, Tensor]
) -> TrainingState:
    """Put weights and moments back in place; the loop's numbers are returned."""
    try:
        with safe_open(path, framework="pt") as file:
            state = TrainingState(**json.loads(file.metadata()["state"]))
            _fill(file, module, optimiser)
            average.tensors = {name: _placed(file, f"average.{name}", w) for name, w in average.tensors.items()}
            for name, tensor in carried.items():
                tensor.copy_(file.get_tensor(f"state.{name}"))
            if not isinstance(state.step, int):
                raise TypeError("step")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the checkpoint {path} does not belong to this model or is damaged ({type(error).__name__}): "
            "delete it to train from the start"
        ) from error
    return state


@torch.no_grad()
def _fill(file: Any, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    names = set(file.keys())
    for name, weight in module.named_parameters():
        weight.copy_(_placed(file, f"weight.{name}", weight))
        moments = {key: f"optimiser.{key}.{name}" for key in ("exp_avg", "exp_avg_sq")}
        if f"optimiser.step.{name}" in names:
            optimiser.state[weight] = {"step": file.get_tensor(f"optimiser.step.{name}")} | {
                key: _placed(file, moment, weight) for key, moment in moments.items()
            }


def _placed(file: Any, name: str, like: Tensor) -> Tensor:
    """A tensor of the file where ``like`` is, and sharded as it is."""
    tensor: Tensor = file.get_tensor(name).to(like.device)
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor), "it is sharded"
    if tensor.shape != like.shape:
        raise TypeError(name)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def save_weights(path: Path, module: nn.Module, ranks: Ranks = _ALONE) -> None:
    """Write the weights alone. All ranks call this."""
    _write(path, {name: weight.detach() for name, weight in module.named_parameters()}, ranks)


def _write(path: Path, tensors: dict[str, Tensor], ranks: Ranks, metadata: dict[str, str] | None = None) -> None:
    gathered = {}
    for name, tensor in tensors.items():
        full = whole_tensor(tensor)  # all ranks take part in this
        if ranks.is_first:
            gathered[name] = full.cpu().contiguous()
    if ranks.is_first:
        with atomic_write(path) as aside:
            save_file(gathered, aside, metadata=metadata)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has a part of it, without importing torch's module of such tensors, which is slow."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered where it is sharded."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def restore_weights(path: Path, module: nn.Module) -> None:
    """Read the weights alone."""
    with (
        corruption_as_user_error(path, "delete its folder and train again"),
        safe_open(path, framework="pt") as file,
        torch.no_grad(),
    ):
        for name, weight in module.named_parameters():
            weight.copy_(file.get_tensor(name))
