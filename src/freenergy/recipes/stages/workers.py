"""What workers open to make shards of a run: its recipe, its corpus and its base.

Corpus and base are loaded once per process; a worker that sees another run than the process that gives it work refuses.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, host
from freenergy.core.roles import LanguageModel
from freenergy.core.workers.shards import ShardJob, ShardMaker
from freenergy.corpus import Corpus
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.load import load_run
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.language_models import load_base, rung_names

_RECIPE = "recipe"
Marks = tuple[tuple[str, str], ...]  # the recipe's fingerprint, and the keys of finished stages


class Opened(NamedTuple):
    """A run with what most of its shards are made of."""

    run: ResidualRun
    corpus: Corpus
    lm: LanguageModel


def job(
    run: ResidualRun, open_shards: Callable[..., ShardMaker], after: tuple[str, ...], *arguments: object
) -> ShardJob:
    """For workers: ``open_shards(opened, *arguments)``, of a run in which the stages ``after`` are finished."""
    return ShardJob(_open, run.folder.resolve(), (open_shards, _marks(run, after), *arguments))


def _marks(run: ResidualRun, after: tuple[str, ...]) -> Marks:
    keys = [(name, str(run.finished(name)["key"])) for name in (rung_names(run)[-1], *after)]
    return ((_RECIPE, fingerprint(run.recipe.to_json())), *keys)


def _open(folder: Path, open_shards: Callable[..., ShardMaker], marks: Marks, *arguments: object) -> ShardMaker:
    run = load_run(folder)
    found = _marks(run, tuple(name for name, _ in marks[2:]))
    for wanted in marks:
        if wanted not in found:
            raise UserError(
                f"{host()} sees another {wanted[0]} in {folder} than the process that gives it work: take a folder on "
                "a disk that all workers share"
            )
    return open_shards(Opened(run, *_models(folder, marks[1])), *arguments)


@lru_cache(maxsize=1)
def _models(folder: Path, base: tuple[str, str]) -> tuple[Corpus, LanguageModel]:
    """``base`` names what is there now."""
    run = load_run(folder)
    corpus = open_corpus(run)
    return corpus, load_base(run, corpus)
