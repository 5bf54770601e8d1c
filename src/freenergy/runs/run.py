"""A run is a folder, and its stages are done in order, each once.

    key(stage) = fingerprint(era, its part of the recipe, what it reads, keys of the stages before)

A stage works in a folder of its own. ``stage.json`` is written there last and holds the key and checksums of all files:
while the key is the same, the stage is not done again (``folder`` says when it resumes). Which stages there are is up
to the recipe; nothing here knows what they do. Under torchrun or ``accelerate launch`` all ranks call this: the first
does what has no networks to train while the others wait, and alone writes the records in these folders.
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import torch

from freenergy.core.checksums import RECIPE as RECIPE
from freenergy.core.checksums import STAGE as DONE
from freenergy.core.checksums import digest_matches, with_digest, write_with_checksums
from freenergy.core.compatibility import check_format, with_format
from freenergy.core.device import device, preferring
from freenergy.core.errors import UserError
from freenergy.core.files import disk_full_as_user_error, exclusive_lock, read_json, remove_partial_files, write_json
from freenergy.core.progress import Progress, Silent
from freenergy.core.workers.pool import InProcess, WorkerPool
from freenergy.runs.folder import REPLACED, adopt, begin, check_free, key_of, package_version, replaced, withdraw
from freenergy.training.distributed.ranks import Ranks, by_itself

_SILENT, _IN_PROCESS, _ALONE = Silent(), InProcess(), Ranks()
_PACKAGES = ("freenergy", "torch", "transformers", "tokenizers", "numpy")


@runtime_checkable
class Recipe(Protocol):
    """What a run needs to know of its recipe, whatever family the recipe is of."""

    @property
    def name(self) -> str:
        """Names the run's folder."""

    @property
    def seed(self) -> int:
        """Decides every random choice."""

    @property
    def device(self) -> str:
        """Where networks compute, unless another device was chosen for this command."""

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as JSON-like values, which ``recipes.make_recipe`` reads again."""

    def stages(self) -> "tuple[Stage[Any], ...]":
        """Returns the stages in order."""


R_co = TypeVar("R_co", bound=Recipe, covariant=True)
R_contra = TypeVar("R_contra", bound=Recipe, contravariant=True)


@final
@dataclass(frozen=True, slots=True)
class Run(Generic[R_co]):
    """A folder with everything about one run, the recipe that it follows, and the workers that make its shards."""

    folder: Path
    recipe: R_co
    workers: WorkerPool = _IN_PROCESS

    def stage(self, name: str) -> Path:
        """Returns the folder of a stage."""
        return self.folder / name

    @property
    def features(self) -> Path:
        """Where features that several energies may share are kept."""
        return self.folder / "features"

    def finished(self, name: str) -> dict[str, Any]:
        """Returns the record of a finished stage."""
        path = self.stage(name) / DONE
        if not path.is_file():
            raise UserError(f"the stage {name} of {self.folder} is not finished: `freenergy run` it first")
        record: dict[str, Any] = read_json(path)
        check_format(record, path)
        is_record = isinstance(record.get("key"), str) and isinstance(record.get("after", {}), dict)
        if not is_record or not digest_matches(record):
            raise UserError(f"{path} is damaged: delete it and `freenergy run` it again")
        for before, key in record.get("after", {}).items():
            if self.finished(before).get("key") != key:
                raise UserError(f"{self.folder}: {before} has changed since {name} was made; `freenergy run` it again")
        return record


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a stage depends on, and what it will do in its folder."""

    inputs: Any  # JSON-like values and settings; see ``keys.without_defaults``
    work: Callable[[Path, Progress], dict[str, Any]]
    is_shared: bool = False  # all ranks of a distributed training do it; the first one's summary counts


@final
@dataclass(frozen=True, slots=True)
class Stage(Generic[R_contra]):
    """One step of a run. Planning looks up names and files once, so that key and work are about the same text."""

    name: str
    plan: Callable[[Run[R_contra], Progress], Plan]
    after: tuple[str, ...] = ()  # the stages whose results it reads; a change there is a change here
    version: int = 1  # of its algorithm: raised by a change of the code that gives other results


@final
@dataclass(frozen=True, slots=True)
class StageResult:
    """What came of a stage."""

    name: str
    summary: dict[str, Any]
    seconds: float
    was_cached: bool


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    stage: str | None = None,
    progress: Progress = _SILENT,
    workers: WorkerPool = _IN_PROCESS,
    reuse: Sequence[Path] = (),
) -> Iterator[StageResult]:
    """Do what is not done yet, up to ``stage``; yields one result per stage.

    The folder is ``runs/NAME`` unless ``out`` names another. ``workers`` make the shards of
    stages; which one it is does not change a bit of the result. A stage that another run in ``reuse`` has finished
    under the same key is taken from there.
    """
    chosen = _up_to(stage, recipe)
    this = Run(Path(out) if out is not None else Path("runs") / recipe.name, recipe, workers)
    with preferring(recipe.device):  # one that is not here is refused before anything is written
        ranks = Ranks.found()
    with ranks.together(), working_in(this.folder, ranks):
        with ranks.first_rank_first(), preferring(recipe.device):
            # all plans first: a checkpoint that is missing is found out before the corpus is prepared, not after
            plans = [each.plan(this, progress) for each in chosen]
            if ranks.is_first:
                write_json(this.folder / RECIPE, with_digest(recipe.to_json()))
        keys: dict[str, str] = {}
        for each, plan in zip(chosen, plans, strict=True):
            after = {name: keys[name] for name in each.after if name in keys}  # a run without an energy has fewer
            step = Step(each.name, plan, this.stage(each.name), after, version=each.version)
            if ranks.is_first:
                step.take_from([folder / each.name for folder in reuse])
                step.say_what_is_replaced(progress)
            with preferring(recipe.device):  # not across a yield: between stages the caller decides
                result = step.done(this.workers, progress, ranks)
            yield result
            keys[each.name] = step.key


def finish(stage: Stage[R_contra], this: Run[R_contra], folder: Path, progress: Progress) -> StageResult:
    """Do a stage that is not among those of the recipe, in a folder of its own, after stages that are finished.

    Such a folder may be the user's, so one that was begun with other settings is refused, not emptied.
    """
    after = {name: str(this.finished(name)["key"]) for name in stage.after}
    step = Step(stage.name, stage.plan(this, progress), folder, after, keep_others=True, version=stage.version)
    check_free(folder, step.key, keep_others=True)
    with working_in(folder), preferring(this.recipe.device):
        return step.done(this.workers, progress)


@contextmanager
def working_in(folder: Path, ranks: Ranks = _ALONE) -> Iterator[None]:
    """Keep other processes out of a folder, and remove what killed ones were writing there."""
    with exclusive_lock(folder) if ranks.is_first else nullcontext(), disk_full_as_user_error(folder):
        if ranks.is_first:
            remove_partial_files(folder)
        yield


def _up_to(stage: str | None, recipe: Recipe) -> tuple[Stage[Any], ...]:
    every = recipe.stages()
    names = [each.name for each in every]
    if stage is None:
        return every
    if stage not in names:
        hint = " (the recipe has no energy)" if stage in ("negatives", "energy") else ""
        raise UserError(f"there is no stage {stage!r}{hint}: choose one of {', '.join(names)}")
    return every[: names.index(stage) + 1]


def is_current(stage: Stage[R_contra], this: Run[R_contra]) -> bool:
    """Returns whether a finished stage was made by the recipe that the run has now."""
    record = this.finished(stage.name)
    before = record.get("after", {})
    after = {name: before[name] for name in stage.after if name in before}  # JSON has them sorted
    step = Step(stage.name, stage.plan(this, _SILENT), this.stage(stage.name), after, version=stage.version)
    return bool(record["key"] == step.key)


@final
@dataclass(frozen=True, slots=True)
class Step:
    """A stage that is planned, the folder that it works in, and the keys of the stages that it reads."""

    name: str
    plan: Plan
    folder: Path
    after: Mapping[str, str]
    keep_others: bool = False  # what another key has left in the folder is refused, not set aside
    version: int = 1  # of the stage's algorithm

    @property
    def key(self) -> str:
        """Names what the stage is made of."""
        name = self.name if self.version == 1 else f"{self.name} {self.version}"
        return key_of(name, self.plan.inputs, list(self.after.values()))

    def done(self, workers: WorkerPool, progress: Progress, ranks: Ranks = _ALONE) -> StageResult:
        """Do the stage unless it is done."""
        is_done = ranks.of_first(float(self._recorded(self.folder) is not None))
        found = None if is_done else self._do(workers, progress, ranks)
        found = found or self._recorded(self.folder)
        if found is None:
            raise UserError(f"{self.folder} is not what the first rank has written: give all ranks one --out")
        return found

    def take_from(self, others: Sequence[Path]) -> None:
        """Take the folder back from what was set aside, or over from another run that has finished the same."""
        if self._recorded(self.folder):
            return
        if self._recorded(replaced(self.folder, self.key)):
            begin(self.folder, self.key)
        elif (found := next(filter(self._recorded, others), None)) is not None:
            adopt(found, self.folder)

    def say_what_is_replaced(self, progress: Progress) -> None:
        """Say that finished work of other settings is about to be set aside."""
        if (self.folder / DONE).is_file() and not self._recorded(self.folder):
            kept = self.folder.parent / REPLACED
            progress.say(f"{self.name}: settings or inputs have changed; what it held before is kept in {kept}")

    def _recorded(self, folder: Path) -> StageResult | None:
        """Returns the result of the stage where it is finished."""
        if not (folder / DONE).is_file():
            return None
        record = read_json(folder / DONE)
        check_format(record, folder / DONE)
        if not digest_matches(record):
            raise UserError(f"{folder / DONE} is damaged: copy it again, or delete {folder} and run the recipe again")
        is_record = isinstance(record.get("summary"), dict) and "seconds" in record
        if record.get("key") != self.key or not is_record:
            return None
        return StageResult(self.name, record["summary"], record["seconds"], was_cached=True)

    def _do(self, workers: WorkerPool, progress: Progress, ranks: Ranks) -> StageResult | None:
        """Do the stage; the first rank has its result and, before the others continue, has written it."""
        is_resumed = begin(self.folder, self.key, keep_others=self.keep_others) if ranks.is_first else False
        ranks.barrier()
        started, before = time.monotonic(), _cpu_seconds(workers)
        try:
            with nullcontext() if self.plan.is_shared else by_itself():
                summary = self.plan.work(self.folder, progress) if ranks.is_first or self.plan.is_shared else {}
        except UserError:
            if ranks.is_first:
                withdraw(self.folder)
            raise
        seconds = time.monotonic() - started
        worked = ranks.everyone(torch.tensor(_cpu_seconds(workers) - before, dtype=torch.float64)).sum().item()
        cpu_seconds = None if is_resumed else worked  # a part of the cost is not the cost
        # through JSON, so that a fresh result and a cached one are the same
        summary = json.loads(json.dumps(summary))
        record = {"key": self.key, "after": dict(self.after), "summary": summary, "versions": versions()}
        if ranks.is_first:
            cost = {"seconds": seconds, "cpu_seconds": cpu_seconds, "device": str(device())}
            write_with_checksums(self.folder / DONE, with_format(record | cost), progress)
        ranks.barrier()
        return StageResult(self.name, summary, seconds, was_cached=False) if ranks.is_first else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide the numbers."""
    return {name: package_version(name) for name in _PACKAGES} | {"python": platform.python_version()}


def _cpu_seconds(workers: WorkerPool) -> float:
    return time.process_time() + workers.cpu_seconds
