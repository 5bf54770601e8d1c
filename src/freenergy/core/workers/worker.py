"""What a worker copies from its coordinator, so that both compute the same bits.

    number of torch threads, environment variables (offline mode, caches, keys), working directory, package version

A worker applies these before it imports anything that reads them.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import host

_COPIED_PREFIXES = ("FREENERGY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TQDM_", "OMP_", "MKL_", "XDG_")
# a worker is not a rank of torchrun, even if a rank started it
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """The settings of the coordinator process that its workers copy."""

    threads: int
    environment: tuple[tuple[str, str], ...]
    folder: str
    version: str

    @classmethod
    def current(cls) -> "WorkerEnvironment":
        """Read the settings of this process."""
        import torch

        copied = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_COPIED_PREFIXES)))
        return cls(torch.get_num_threads(), copied, str(Path.cwd()), version("freenergy"))

    def apply(self) -> None:
        """Apply them to this process, before anything that reads the environment is imported."""
        if version("freenergy") != self.version:
            raise UserError(
                f"a worker on {host()} has freenergy {version('freenergy')}, the coordinator {self.version}: install "
                "the same version everywhere"
            )
        for name in _TORCHRUN:
            os.environ.pop(name, None)
        # the tokenizers library would use all cores in each worker
        os.environ.update({**dict(self.environment), "TOKENIZERS_PARALLELISM": "false"})
        if Path(self.folder).is_dir():
            os.chdir(self.folder)  # recipes may name files relative to it
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def timed(do: Callable[[Any], Any], item: Any) -> tuple[float, Any]:
    """Return the CPU seconds that ``do(item)`` took, and its result."""
    start = time.process_time()
    result = do(item)
    return time.process_time() - start, result


def worker_died_error(item: Any, times: int, why: str) -> UserError:
    """Return the error for an item whose workers keep dying."""
    name = str(item) if len(str(item)) < 40 else f"{str(item)[:40]}…"
    return UserError(
        f"workers died {times} times while processing item {name} ({why}), probably out of memory: use fewer workers "
        "(--workers local:N) or smaller shards, then run the command again"
    )
