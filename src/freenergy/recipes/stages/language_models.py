"""The language models of a run, rung by rung.

    base → tuned → local        each is a stage of its own, and a correction of the one before

The last rung that the recipe asks for is the P_LM that an energy corrects. Every stage that reads it names ``RUNGS``
among the stages that it comes after, so that a change of any rung is a change of what is built on it.
"""

from pathlib import Path

from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.lm.load import load_lm
from freenergy.recipes.families.residual import ResidualRecipe, ResidualRun
from freenergy.training.settings import adaptation, tuning

RUNGS = ("base", "tuned", "local")
NETWORKS = ("base", "tuned")  # a network is corrected by other weights of its own, a mix is not


def first_documents(share: float, available: int) -> int:
    """Returns how many documents a share of them are: the first ones, at least one."""
    return max(1, round(share * available))


def tuned_share(recipe: ResidualRecipe) -> float:
    """Returns the share of the training documents that tuning reads: with a local mix those that the mix counts."""
    tune, local = tuning(recipe.base), adaptation(recipe.base)
    if tune is not None and tune.documents is not None:
        return tune.documents
    return local.documents if local is not None else 1.0


def known_documents(recipe: ResidualRecipe, available: int) -> int:
    """Returns how many of the training documents, the first, energies do not learn from: a rung knows them by heart.

    A rung that reads all documents leaves none, and then, as on top of a base that was trained on them, none is left
    out.
    """
    shares = [tuned_share(recipe)] if tuning(recipe.base) else []
    shares += [local.documents] if (local := adaptation(recipe.base)) else []
    return max((first_documents(share, available) for share in shares if share < 1), default=0)


def rung_names(run: ResidualRun) -> tuple[str, ...]:
    """Returns the rungs that the recipe asks for, in order."""
    return tuple(stage.name for stage in run.recipe.stages() if stage.name in RUNGS)


def base_folder(run: ResidualRun) -> Path:
    """Returns the folder of the last rung."""
    return run.stage(rung_names(run)[-1])


def load_base(run: ResidualRun, corpus: Corpus) -> LanguageModel:
    """Loads the last rung: the language model that the run's energy corrects."""
    return load_lm(base_folder(run), corpus.tokenizer)


def load_network(run: ResidualRun, corpus: Corpus) -> LanguageModel:
    """Loads the last rung that can be a network: what baselines, which are rivals of a local mix, start from."""
    names = [name for name in rung_names(run) if name in NETWORKS]
    return load_lm(run.stage(names[-1]), corpus.tokenizer)


def lower_rungs(run: ResidualRun, corpus: Corpus) -> dict[str, LanguageModel]:
    """Loads the rungs below the last one by name, in order: what the ladder compares it with."""
    return {name: load_lm(run.stage(name), corpus.tokenizer) for name in rung_names(run)[:-1]}
