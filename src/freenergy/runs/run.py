"""A run is a folder, and its stages are done in order, each once.

    key(stage) = fingerprint(version, its part of the recipe, what it reads, key(the stage before))

A stage works in a folder of its own. ``stage.json`` is written there last and holds the key, and a seal of all files
(``seals``): while the key is the same, the stage is not done again. A folder begun under another key is emptied first,
one begun under the same key goes on.

Under torchrun or ``accelerate launch`` all ranks come through here. The first does what has no networks to train while
the others wait; it alone writes what is in these folders.
"""

import importlib.metadata
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from freenergy.core.checksums import STAGE as _DONE
from freenergy.core.checksums import digest_matches, write_with_checksums
from freenergy.core.errors import UserError
from freenergy.core.files import (
    disk_full_as_user_error,
    exclusive_lock,
    fingerprint,
    read_json,
    remove_partial_files,
    write_json,
)
from freenergy.core.progress import Progress, Silent
from freenergy.core.workers.local import InProcess
from freenergy.core.workers.protocol import WorkerPool
from freenergy.recipes.load import Recipe, make_recipe
from freenergy.training.distributed.ranks import Ranks, by_itself

_SILENT, _IN_PROCESS = Silent(), InProcess()
_BEGUN, _RECIPE = "begun.json", "recipe.json"
_PACKAGES = ("freenergy", "torch", "transformers", "tokenizers", "numpy")


@final
@dataclass(frozen=True, slots=True)
class Run:
    """A folder with everything about one run, the recipe that it follows, and who makes its shards."""

    folder: Path
    recipe: Recipe
    workers: WorkerPool = _IN_PROCESS

    @classmethod
    def open(cls, folder: str | Path, workers: WorkerPool = _IN_PROCESS) -> "Run":
        """An existing run."""
        folder = Path(folder)
        if not (folder / _RECIPE).is_file():
            raise UserError(f"{folder} is no run: give the folder that `freenergy run` made (it has a {_RECIPE})")
        return cls(folder, make_recipe(read_json(folder / _RECIPE), origin=str(folder / _RECIPE)), workers)

    def stage(self, name: str) -> Path:
        """The folder of a stage."""
        return self.folder / name

    @property
    def features(self) -> Path:
        """Where features that several energies may share are kept."""
        return self.folder / "features"

    def finished(self, name: str) -> dict[str, Any]:
        """The record of a finished stage."""
        path = self.stage(name) / _DONE
        if not path.is_file():
            raise UserError(f"the stage {name} of {self.folder} is not finished: `freenergy run` it first")
        record: dict[str, Any] = read_json(path)
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

    inputs: Any
    work: Callable[[Path, Progress], dict[str, Any]]
    is_shared: bool = False  # all ranks of a distributed training do it; the first one's summary counts


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a run. Planning looks up names and files once, so that key and work are about the same text."""

    name: str
    plan: Callable[[Run, Progress], Plan]
    after: tuple[str, ...] = ()  # the stages whose results it reads; a change there is a change here


@final
@dataclass(frozen=True, slots=True)
class StageResult:
    """What came of a stage."""

    name: str
    summary: dict[str, Any]
    seconds: float
    was_cached: bool


def stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe, in order."""
    from freenergy.recipes.stages import base, baselines, candidates, corpus, energy, evaluation, negatives

    chosen = [corpus.STAGE, base.STAGE]
    if recipe.energy is not None:
        chosen += [negatives.STAGE, energy.STAGE, candidates.STAGE]
    if recipe.baselines:
        chosen.append(baselines.STAGE)
    return (*chosen, evaluation.STAGE)


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    stage: str | None = None,
    progress: Progress = _SILENT,
    workers: WorkerPool = _IN_PROCESS,
) -> Iterator[StageResult]:
    """Do what is not done yet, up to ``stage``; yields a result a stage.

    The folder is ``runs/NAME`` unless ``out`` names another. ``engine`` is whose workers make the shards of stages;
    which one it is does not change a bit of the result.
    """
    chosen = _up_to(stage, recipe)
    this = Run(Path(out) if out is not None else Path("runs") / recipe.name, recipe, workers)
    ranks = Ranks.found()
    alone = exclusive_lock(this.folder) if ranks.is_first else nullcontext()
    with ranks.together(), alone, disk_full_as_user_error(this.folder):
        with ranks.first_rank_first():
            if ranks.is_first:
                remove_partial_files(this.folder)
            # all plans first: a checkpoint that is missing is found out before the corpus is prepared, not after
            plans = [each.plan(this, progress) for each in chosen]
            if ranks.is_first:
                write_json(this.folder / _RECIPE, recipe.to_json())
        keys: dict[str, str] = {}
        for each, plan in zip(chosen, plans, strict=True):
            before = [keys[name] for name in each.after if name in keys]  # a run without an energy has fewer stages
            key = key_of(each, plan, before)
            is_done = ranks.of_first(float(_done(each, this, key) is not None))
            found = None if is_done else _do(each, plan, this, key, keys, progress, ranks)
            yield found or _recorded(each, this, key)
            keys[each.name] = key


def _up_to(stage: str | None, recipe: Recipe) -> tuple[Stage, ...]:
    every = stages(recipe)
    names = [each.name for each in every]
    if stage is None:
        return every
    if stage not in names:
        hint = " (the recipe has no energy)" if stage in ("negatives", "energy") else ""
        raise UserError(f"there is no stage {stage!r}{hint}: choose one of {', '.join(names)}")
    return every[: names.index(stage) + 1]


def is_current(stage: Stage, this: Run) -> bool:
    """Whether a finished stage was made by the recipe that the run has now."""
    record = this.finished(stage.name)
    after = record.get("after", {})
    before = [after[name] for name in stage.after if name in after]
    return bool(record["key"] == key_of(stage, stage.plan(this, _SILENT), before))


def key_of(stage: Stage, plan: Plan, before: list[str]) -> str:
    """What a stage is made of; ``before`` are the keys of the stages that it reads."""
    return fingerprint([_version("freenergy"), stage.name, plan.inputs, before])


def _done(stage: Stage, this: Run, key: str) -> StageResult | None:
    path = this.stage(stage.name) / _DONE
    if not path.is_file():
        return None
    record = read_json(path)
    is_record = isinstance(record.get("summary"), dict) and "seconds" in record and digest_matches(record)
    if record.get("key") != key or not is_record:
        return None
    return StageResult(stage.name, record["summary"], record["seconds"], was_cached=True)


def _recorded(stage: Stage, this: Run, key: str) -> StageResult:
    """The result of a stage that this rank, or the first, knows to be done."""
    found = _done(stage, this, key)
    if found is None:
        raise UserError(f"{this.stage(stage.name)} is not what the first rank has written: give all ranks one --out")
    return found


def _do(
    stage: Stage, plan: Plan, this: Run, key: str, keys: dict[str, str], progress: Progress, ranks: Ranks
) -> StageResult | None:
    """Do a stage; the first rank has its result and, before the others go on, has written it."""
    folder = this.stage(stage.name)
    is_resumed = _begin(folder, key) if ranks.is_first else False
    ranks.barrier()
    started, before = time.monotonic(), _cpu_seconds(this)
    with nullcontext() if plan.is_shared else by_itself():
        summary = plan.work(folder, progress) if ranks.is_first or plan.is_shared else {}
    seconds = time.monotonic() - started
    worked = ranks.everyone(torch.tensor(_cpu_seconds(this) - before, dtype=torch.float64)).sum().item()
    cpu_seconds = None if is_resumed else worked  # a part of the cost is not the cost
    versions = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    # through JSON, so that a fresh result and a cached one are the same
    summary = json.loads(json.dumps(summary))
    after = {name: keys[name] for name in stage.after if name in keys}
    record = {"key": key, "after": after, "summary": summary, "versions": versions}
    if ranks.is_first:
        write_with_checksums(folder / _DONE, record | {"seconds": seconds, "cpu_seconds": cpu_seconds}, progress)
    ranks.barrier()
    return StageResult(stage.name, summary, seconds, was_cached=False) if ranks.is_first else None


def _cpu_seconds(this: Run) -> float:
    """Of this process and of workers."""
    return time.process_time() + this.workers.cpu_seconds


def _begin(folder: Path, key: str) -> bool:
    """Make the folder ready; whether it holds a part of this stage already."""
    begun = folder / _BEGUN
    if begun.is_file() and read_json(begun).get("key") == key:
        return True
    _empty(folder)
    write_json(begun, {"key": key})
    return False


def _empty(folder: Path) -> None:
    """Remove an earlier stage's folder; never one that a stage has not made."""
    marks = [folder / _DONE, folder / _BEGUN]
    if folder.exists() and any(folder.iterdir()) and not any(mark.is_file() for mark in marks):
        raise UserError(f"{folder} holds files that no run has made: move them, or choose another --out")
    if folder.exists():
        # under another name first: a stage that a kill has left half removed must not count as done, but be swept
        doomed = folder.with_name(f".{folder.name}.old.part")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _version(package: str) -> str:
    return importlib.metadata.version(package)
