"""What a worker takes over from the process that gives it work, so that the two compute the same bits.

    threads of torch, environment (offline, caches, keys), working folder, version of this package

A worker is told all this before it imports anything that reads it.
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

_TAKEN = ("FREENERGY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TQDM_", "OMP_", "MKL_", "XDG_")
# a worker is no rank, whoever starts it
_LEFT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True, slots=True)
class Surroundings:
    """How the process that gives work is set up."""

    threads: int
    environment: tuple[tuple[str, str], ...]
    folder: str
    version: str

    @classmethod
    def here(cls) -> "Surroundings":
        """Those of this process."""
        import torch

        taken = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_TAKEN)))
        return cls(torch.get_num_threads(), taken, str(Path.cwd()), version("freenergy"))

    def enter(self) -> None:
        """Take them over, before anything that reads the environment is imported."""
        if version("freenergy") != self.version:
            raise UserError(
                f"a worker on {host()} has freenergy {version('freenergy')} and not {self.version}: install the same "
                "version everywhere"
            )
        for name in _LEFT:
            os.environ.pop(name, None)
        # the tokenizers library would use all cores in each worker
        os.environ.update({**dict(self.environment), "TOKENIZERS_PARALLELISM": "false"})
        if Path(self.folder).is_dir():
            os.chdir(self.folder)  # recipes may name files relative to it
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


def timed(do: Callable[[Any], Any], item: Any) -> tuple[float, Any]:
    """The CPU seconds that a result took, and the result."""
    begun = time.process_time()
    result = do(item)
    return time.process_time() - begun, result


def given_up(item: Any, times: int, why: str) -> UserError:
    """Say that an item kills whoever works on it."""
    name = str(item) if len(str(item)) < 40 else f"{str(item)[:40]}…"
    return UserError(
        f"a worker has died {times} times over item {name} ({why}): it may need more memory than there is, so take "
        "fewer workers (--engine local:N) or smaller shards, then run it again"
    )
