"""Where networks compute: the CPU, a GPU of NVIDIA or AMD (``cuda``), or one of Apple (``mps``).

    explicit choice (``--device``, ``computing_on``)  >  the recipe's key  >  $FREENERGY_DEVICE  >  auto

``auto`` is the first GPU, and the CPU where there is none. Networks and the tensors that they read live on this device;
records that outlive a step (scores, draws, files) live on the CPU. Random numbers are drawn on the CPU, so that a seed
means the same draws everywhere, up to rounding.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from freenergy.core.errors import UserError

AUTO = "auto"
VARIABLE = "FREENERGY_DEVICE"
_NAME = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")
_chosen: ContextVar[str] = ContextVar("chosen_device", default=AUTO)
_preferred: ContextVar[str] = ContextVar("preferred_device", default=AUTO)


def check_device_name(name: str, place: str = "device") -> str:
    """Return the name of a device, or refuse what is none; whether the machine has it is not asked.

    >>> check_device_name("cuda:1")
    'cuda:1'
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{place} is {name[:40]!r}: take auto, cpu, cuda, cuda:1 (the second GPU) or mps")
    return name


def asked_device() -> str:
    """Return the name in force: the explicit choice, else the recipe's, else the environment's, else ``auto``."""
    for name in (_chosen.get(), _preferred.get()):
        if name != AUTO:
            return name
    return check_device_name(os.environ.get(VARIABLE) or AUTO, f"${VARIABLE}")


def device() -> torch.device:
    """Return the device to compute on; one that was asked for by name and is not here is refused."""
    name = asked_device()
    if name == AUTO:
        return _best()
    if name.startswith("cuda"):
        _check_cuda(name)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device is mps, and torch finds no Apple GPU here: take --device cpu or auto")
    return torch.device(name)


@contextmanager
def computing_on(name: str | torch.device | None) -> Iterator[None]:
    """Within, networks compute on this device, whatever recipes and the environment say; ``None`` leaves it open."""
    before = _chosen.set(_chosen.get() if name is None else check_device_name(str(name), "--device"))
    try:
        device()  # refuse at once what is not here
        yield
    finally:
        _chosen.reset(before)


@contextmanager
def preferring(name: str) -> Iterator[None]:
    """Within, networks compute on a recipe's device unless another was chosen explicitly."""
    before = _preferred.set(check_device_name(name))
    try:
        device()
        yield
    finally:
        _preferred.reset(before)


def wide(like: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: float64, and float32 where there is none (mps)."""
    return torch.float32 if like.type == "mps" else torch.float64


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as files keep them: on the CPU, contiguous, detached."""
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def _best() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _check_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        built = "this torch is built for the CPU only" if not torch.backends.cuda.is_built() else "torch finds no GPU"
        raise UserError(f"device is {name}, and {built}: take --device cpu, or install a torch with CUDA")
    count = torch.cuda.device_count()
    if ":" in name and int(name.partition(":")[2]) >= count:
        raise UserError(f"device is {name}, and there are {count} GPUs here: take one of cuda:0 … cuda:{count - 1}")
