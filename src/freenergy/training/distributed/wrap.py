"""One task on many ranks.

    plain      one rank: the task itself
    DDP        every rank has all weights; gradients are averaged in the backward pass of a step's last micro-batch
    FSDP       every rank has 1/R of every weight, gradient and moment; a layer's weights are gathered when it is read

The whole loss of a task is one forward of one module, so an energy, E-ARM's draws or a second pass may call networks as
often as they like inside. A checkpoint is the same file for all three.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.task import Task, Validation


@final
class TaskModule(nn.Module):
    """A task as a module. Its outputs are tensors, as hooks look for tensors; the rest is left in ``found``."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.module, self.task = task.module, task
        self.found = Loss(torch.zeros(()), {})

    def forward(self, step: int, micro: int, rng: Rng) -> Tensor:
        """The loss of a micro-batch."""
        self.found = self.task.loss(step, micro, rng)
        return self.found.value

    def validate(self) -> Validation:
        """How good the module is on held-out data; all ranks read all of them."""
        return self.task.validate()


@final
class DistributedTask:
    """A task that takes its steps together with other ranks."""

    def __init__(self, whole: TaskModule, model: nn.Module, ranks: Ranks) -> None:
        self.whole, self.model, self.task, self.ranks = whole, model, whole.task, ranks

    def backward(self, step: int, micro: int, rng: Rng, *, share: int, is_last: bool) -> Loss:
        """The loss of a micro-batch; its gradient is added to, as one of ``share`` micro-batches of this rank."""
        with nullcontext() if is_last else self._without_sync():
            value: Tensor = self.model(step, micro, rng)
            (value / share).backward()
        return Loss(value.detach(), self.whole.found.metrics, self.whole.found.statistics)

    def _without_sync(self) -> AbstractContextManager[Any]:
        """Gradients stay on the rank; where weights are sharded they never do, as a rank has no room for them."""
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()


@contextmanager
def distributed(task: Task, ranks: Ranks) -> Iterator[DistributedTask]:
    """Within, the task's module is ready for steps on all ranks; afterwards it is a plain module again.

    Where weights were sharded they are left unfilled: the caller has the best ones in a file.
    """
    whole = TaskModule(task)
    if ranks.count == 1:
        task.module.to(ranks.device)
        yield DistributedTask(whole, whole, ranks)
        return
    before = next(task.module.parameters()).device
    if ranks.is_sharded:
        with _sharded(whole):
            yield DistributedTask(whole, whole, ranks)
    else:
        with _replicated(whole) as model:
            yield DistributedTask(whole, model, ranks)
    task.module.to(before)


@contextmanager
def _replicated(whole: TaskModule) -> Iterator[nn.Module]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # some losses leave weights out now and then; buffers are constants that every rank has computed
    settings = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
    accelerator = Accelerator(kwargs_handlers=[settings], mixed_precision="no")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has a new name in some versions of torch
        model = accelerator.prepare_model(whole)
    yield model
    accelerator.free_memory()


@contextmanager
def _sharded(whole: TaskModule) -> Iterator[None]:
    """FSDP works on a module in place, by hooks, classes and attributes: all of them are put back at the end."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    modules = list(whole.modules())
    names = {name for each in modules for name in getattr(each, "_no_split_modules", None) or ()}
    kept = [(each, type(each), _attributes(each)) for each in modules]
    for each in modules:
        if type(each).__name__ in names:
            fully_shard(each, reshard_after_forward=True)
    fully_shard(whole, reshard_after_forward=True)
    register_fsdp_forward_method(whole, "validate")
    yield
    _undo(kept)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module is made of; of torch's own tables a copy. Weights are left out: their storage is to be let go."""
    own = {name: copy.copy(value) if name[0] == "_" else value for name, value in vars(module).items()}
    return {name: value for name, value in own.items() if name != "_parameters"}


@torch.no_grad()
def _undo(kept: list[tuple[nn.Module, type, dict[str, Any]]]) -> None:
    """Plain modules again, with weights of the whole shape that are still to be filled."""
    plain: dict[nn.Parameter, nn.Parameter] = {}  # weights may be tied
    for module, kind, attributes in kept:
        weights = module._parameters
        for name, weight in weights.items():
            if weight is not None and weight not in plain:
                empty = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                plain[weight] = nn.Parameter(empty, requires_grad=weight.requires_grad)
            weights[name] = None if weight is None else plain[weight]
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(attributes | {"_parameters": weights})
