"""Stage ``baselines``: locally normalised models that a residual model is measured against."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.lm.settings import NgramBase, RemoteBase
from freenergy.recipes.families.residual import ResidualRecipe, ResidualRun
from freenergy.recipes.stages.language_models import NETWORKS, load_network
from freenergy.runs.run import Plan, Stage
from freenergy.training.baselines.settings import BalmBaseline, BaselineSettings, LocalBaseline
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.settings import TrainedBase


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    for settings in run.recipe.baselines:
        _check(settings, run.recipe)
    inputs = {
        "seed": run.recipe.seed,
        "settings": run.recipe.baselines,
        "shapes": [_shape(settings, run.recipe) for settings in run.recipe.baselines],
    }
    trained = [each for each in run.recipe.baselines if not _counts_alone(each)]
    for settings in trained:
        Ranks.found().share(settings.optimisation.accumulate, f"the baseline {settings.name!r}: optimisation")
    return Plan(inputs, partial(_work, run), is_shared=bool(trained))


def _counts_alone(settings: BaselineSettings) -> bool:
    return isinstance(settings, LocalBaseline) and settings.features == "ngram"


def _check(settings: BaselineSettings, recipe: ResidualRecipe) -> None:
    """Refuse before anything is done what the recipe's base cannot give."""
    has_no_network = isinstance(recipe.base, NgramBase | RemoteBase)
    stands_alone = isinstance(settings, BalmBaseline) and settings.parameters == "preset"
    if isinstance(recipe.base, RemoteBase) and not stands_alone:
        raise UserError(
            f"the baseline {settings.name!r} corrects the base at every token of the vocabulary, which a served model "
            'does not show: take another base, or kind = "balm" with parameters = "preset"'
        )
    if has_no_network and not _counts_alone(settings) and not stands_alone:
        raise UserError(
            f"the baseline {settings.name!r} of kind {settings.kind!r} needs the base's network, and a base of kind "
            f'{recipe.base.kind!r} has none: take another base, or kind = "local" with features = "ngram"'
        )
    if isinstance(settings, BalmBaseline) and not (settings.preset or _preset(recipe)):
        raise UserError(
            f"the baseline {settings.name!r} names no preset, and the base was not trained by one: set preset, such as "
            '"tiny"'
        )


def _preset(recipe: ResidualRecipe) -> str:
    """The preset that the base is trained by, if it is."""
    return recipe.base.preset if isinstance(recipe.base, TrainedBase) and not recipe.base.start else ""


def _shape(settings: BaselineSettings, recipe: ResidualRecipe) -> dict[str, Any] | None:
    if not isinstance(settings, BalmBaseline):
        return None
    from freenergy.lm.presets import preset

    return asdict(preset(settings.preset or _preset(recipe)))


def _work(run: ResidualRun, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.training.baselines.making import make_baseline

    corpus = Corpus.open(run.stage("corpus"))
    base = load_network(run, corpus)
    records = {}
    for settings in run.recipe.baselines:
        rng, name = Rng(run.recipe.seed).child("baselines", settings.name), settings.name
        records[name] = make_baseline(
            settings, base, corpus, folder / name, rng, progress, base_preset=_preset(run.recipe)
        )
    return records


def open_baselines(run: ResidualRun, corpus: Corpus) -> dict[str, LanguageModel]:
    """The baselines of a run by name."""
    from freenergy.training.baselines.making import open_baseline

    run.finished("baselines")
    base = load_network(run, corpus)
    folder = run.stage("baselines")
    return {each.name: open_baseline(each, base, folder / each.name) for each in run.recipe.baselines}


def baseline_records(run: ResidualRun) -> dict[str, dict[str, Any]]:
    """What each baseline has cost: at least ``parameters``, ``cpu_seconds``, ``steps`` and ``tokens``."""
    from freenergy.training.baselines.making import RECORD

    run.finished("baselines")
    return {each.name: read_json(run.stage("baselines") / each.name / RECORD) for each in run.recipe.baselines}


STAGE = Stage("baselines", _plan, after=NETWORKS)
