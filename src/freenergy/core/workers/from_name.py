"""Builds the worker pool that ``--workers NAME`` selects.

    local           cores // torch threads processes; if that is one, no extra process
    local:N, N      N processes
    ray             the cluster at RAY_ADDRESS, or a local one that lives as long as the command
    ray:ADDRESS     the cluster at this address, as ``ray start --head`` prints it

The bits of a sum may depend on the number of torch threads, so each worker uses as many as the coordinator: set
OMP_NUM_THREADS=1 to turn the remaining cores into workers.
"""

import os

from freenergy.core.errors import UserError
from freenergy.core.workers.local import InProcess, ProcessPool
from freenergy.core.workers.protocol import WorkerPool


def worker_pool(name: str) -> WorkerPool:
    """Return the worker pool of this name; use it as a context manager.

    >>> worker_pool("local:1").size
    1
    """
    kind, _, rest = (f"local:{name}" if name.isdecimal() else name).partition(":")
    if kind == "local":
        size = _number(rest, name) if rest or name.endswith(":") else _default_size()
        return InProcess() if size == 1 else ProcessPool(size)
    if kind != "ray" or name == "ray:":
        raise UserError(f"--workers {name!r} is unknown: choose local, local:N, ray or ray:ADDRESS")
    try:
        from freenergy.core.workers.ray import RayPool
    except ImportError:
        raise UserError("--workers ray needs the ray package: pip install 'freenergy[ray]'") from None
    return RayPool(rest or None)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_size() -> int:
    import torch

    return max(1, cores() // torch.get_num_threads())


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UserError(f"--workers {name!r} needs a number of workers from 1 to 4096: write local:4, for example")
    return int(text)
