"""The ranks of a distributed training, as torchrun or ``accelerate launch`` has started them.

    a step = micro-batches 0 … A − 1,      rank r of R does r, r + R, r + 2R, …,      g = mean over all A of ∇ loss

Which data and which randomness a micro-batch has is a matter of its number alone. So no two ranks read the same rows, a
step is the recipe's whatever R is, and a checkpoint resumes on another number of ranks. Numbers of micro-batches are
gathered in their order, not summed on the way: means over them have the same bits for every R.

Without a launcher there is one rank, and nothing here touches the network.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Shaped
from torch import Tensor, distributed

from freenergy.core.device import asked_device
from freenergy.core.device import device as chosen_device
from freenergy.core.errors import UserError
from freenergy.core.progress import stop_requested

if TYPE_CHECKING:
    from accelerate import PartialState

_LONGEST_WAIT = timedelta(days=30)  # the first rank may draw negatives for days while the others wait
_SHORT_WAIT = timedelta(seconds=10)
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Socket closed")
_SPOKEN = "freenergy/spoken"
_by_itself: ContextVar[bool] = ContextVar("by_itself", default=False)


@final
@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among others; alone unless a launcher has said something else."""

    rank: int = 0
    count: int = 1
    is_sharded: bool = False  # each rank holds a part of every weight (FSDP), else all of them (DDP)

    @classmethod
    def found(cls) -> "Ranks":
        """Reads the environment; the first call connects to the other ranks."""
        if _count() < 2 or _by_itself.get():
            return cls()
        state, is_sharded = _state(), os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        return cls(state.process_index, state.num_processes, is_sharded)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, and speaks."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes and talks to the others."""
        return chosen_device() if self.count == 1 else torch.device(_state().device)

    def share(self, micros: int, section: str = "optimisation") -> range:
        """The micro-batches of a step that are this rank's; ``section`` of the recipe says how many there are.

        >>> [list(Ranks(rank, 2).share(4)) for rank in (0, 1)]
        [[0, 2], [1, 3]]
        """
        if micros % self.count:
            raise UserError(
                f"a step of {micros} micro-batch{'es' * (micros > 1)} cannot be shared by {self.count} ranks: set "
                f"{section}.accumulate to a multiple of {self.count}"
            )
        return range(self.rank, micros, self.count)

    def everyone(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "R ..."]:
        """What every rank has given, rank by rank, on the CPU; all give the same shape."""
        if self.count == 1:
            return tensor.unsqueeze(0).cpu()
        here = tensor.contiguous().to(self.device)
        found = [torch.empty_like(here) for _ in range(self.count)]
        distributed.all_gather(found, here)
        return torch.stack(found).cpu()

    def micros(self, tensor: Shaped[Tensor, "share ..."]) -> Shaped[Tensor, "micros ..."]:
        """What each rank knows of its micro-batches, put together for all of them in their order."""
        return self.everyone(tensor).transpose(0, 1).flatten(0, 1)

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any rank has it set."""
        found: list[bool] = self.everyone(torch.tensor(flags, dtype=torch.uint8)).bool().any(0).tolist()
        return found

    def of_first(self, value: float) -> float:
        """The first rank's number, for all of them to decide by."""
        return float(self.everyone(torch.tensor(value, dtype=torch.float64))[0])

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.everyone(torch.zeros(1))

    @contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """The others enter when the first rank has left, and find what it has written."""
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, a rank that loses the others ends silently: the first rank to end has printed the reason."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not any(words in str(error) for words in _LOST):
                raise
            raise SystemExit(0 if stop_requested() else 1) from error


@contextmanager
def by_itself() -> Iterator[None]:
    """Within, this rank works as if there were no others, which wait for it elsewhere."""
    before = _by_itself.set(True)
    try:
        yield
    finally:
        _by_itself.reset(before)


def speaks() -> bool:
    """Whether this rank is the first that has something to say at its end; the others then keep silent."""
    if _count() < 2:
        return True
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(host, port, is_master=False, timeout=_SHORT_WAIT)  # type: ignore[attr-defined]
        return bool(store.add(f"{_SPOKEN}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # a launcher that keeps no store, or one that has ended
        return os.environ.get("RANK", "0") == "0"


def _count() -> int:
    """How many ranks the launcher has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _state() -> "PartialState":
    """What accelerate has found out; it keeps it."""
    from accelerate import PartialState

    # else transformers leaves the weights of every rank but the first unfilled when it loads a checkpoint under FSDP,
    # for a library to fill that shards them; here all ranks load, and read with, all models
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return PartialState(cpu=asked_device() == "cpu" or not torch.cuda.is_available(), timeout=_LONGEST_WAIT)
