"""Stage ``tuned``: the base's network, fine-tuned on training text."""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.files import read_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.load import RECORD
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.base import Trained, trained_base
from freenergy.recipes.stages.language_models import first_documents, tuned_share
from freenergy.runs.run import Plan, Stage
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.settings import TuneSettings, tuning


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = tuning(run.recipe.base)
    assert settings is not None, "the stage is left out where nothing is tuned"
    if settings.method == "full":
        Ranks.found().share(settings.optimisation.accumulate, "base.tune.optimisation")
    inputs: dict[str, Any] = {"seed": run.recipe.seed, "settings": settings}
    if (share := tuned_share(run.recipe)) < 1:
        inputs["documents"] = share
    # what LoRA trains is small, so the first rank does it alone
    return Plan(inputs, partial(_work, run, settings), is_shared=settings.method == "full")


def _work(run: ResidualRun, settings: TuneSettings, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.training.tuning import tune, tuning_summary

    corpus = Corpus.open(run.stage("corpus"))
    start = run.stage("base") / read_json(run.stage("base") / RECORD)["path"]
    rng, bounds = Rng(run.recipe.seed).child("tuned"), corpus.documents("train")
    num = first_documents(tuned_share(run.recipe), len(bounds) - 1)
    text = corpus.stream("train")[: bounds[num]]

    def train(training: Path) -> Trained:
        return tune(settings, corpus, text, start, training, rng, progress)

    found = trained_base(folder, corpus, train)
    summary = tuning_summary(folder / "training", found["validation_before"]) if found else {}
    return found | summary | {"documents": num}


STAGE = Stage("tuned", _plan, after=("base",))
