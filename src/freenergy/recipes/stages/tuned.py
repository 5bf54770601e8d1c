"""Stage ``tuned``: the base's network, fine-tuned on training text."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freenergy.core.files import read_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.load import RECORD
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.base import Trained, trained_base
from freenergy.runs.run import Plan, Stage
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.settings import TuneSettings, tuning


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = tuning(run.recipe.base)
    assert settings is not None, "the stage is left out where nothing is tuned"
    if settings.method == "full":
        Ranks.found().share(settings.optimisation.accumulate, "base.tune.optimisation")
    inputs = {"seed": run.recipe.seed, "settings": settings}
    # what LoRA trains is small, so the first rank does it alone
    return Plan(inputs, partial(_work, run, settings), is_shared=settings.method == "full")


def _work(run: ResidualRun, settings: TuneSettings, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.training.tuning import tune, tuning_summary

    corpus = Corpus.open(run.stage("corpus"))
    start = run.stage("base") / read_json(run.stage("base") / RECORD)["path"]
    rng = Rng(run.recipe.seed).child("tuned")

    def train(training: Path) -> Trained:
        return tune(settings, corpus, _text(settings, corpus), start, training, rng, progress)

    found = trained_base(folder, corpus, train)
    return found | tuning_summary(folder / "training", found["validation_before"]) if found else {}


def _text(settings: TuneSettings, corpus: Corpus) -> np.ndarray:
    """The tokens of the documents that tuning reads: the first ones."""
    bounds, share = corpus.documents("train"), settings.documents or 1.0
    return corpus.stream("train")[: bounds[max(1, round(share * (len(bounds) - 1)))]]


STAGE = Stage("tuned", _plan, after=("base",))
