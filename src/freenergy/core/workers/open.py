"""From the name of an engine to the engine.

    local           as many processes as cores // threads of torch; where that is one, this process alone
    local:N         N processes
    ray             a cluster that RAY_ADDRESS names, or one of this machine, for as long as the command runs
    ray:ADDRESS     the cluster there, as ``ray start --head`` prints it

Bits may depend on the number of threads that torch sums with, so workers have as many as the process that starts them:
where there are several processes, it is set for each (OMP_NUM_THREADS), and cores that are left over go to workers.
"""

import os

from freenergy.core.errors import UserError
from freenergy.core.workers.local import Here, Pool
from freenergy.core.workers.protocol import Engine


def open_engine(name: str) -> Engine:
    """The engine of this name; use it as a context manager."""
    kind, _, rest = name.partition(":")
    if kind == "local":
        workers = _number(rest, name) if ":" in name else _fitting()
        return Here() if workers == 1 else Pool(workers)
    if kind != "ray" or name == "ray:":
        raise UserError(f"there is no engine {name!r}: choose local, local:N, ray or ray:ADDRESS")
    try:
        from freenergy.core.workers.ray import Cluster
    except ImportError:
        raise UserError("the engine ray needs the package of that name: pip install 'freenergy[ray]'") from None
    return Cluster(rest or None)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting() -> int:
    import torch

    return max(1, cores() // torch.get_num_threads())


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise UserError(f"the engine {name!r} has no number of workers from 1 to 4096: write local:4, for example")
    return int(text)
