"""The language models of a run, rung by rung.

    base → tuned → local        each is a stage of its own, and a correction of the one before

The last rung that the recipe asks for is the P_LM that an energy corrects. Every stage that reads it names ``RUNGS``
among the stages that it comes after, so that a change of any rung is a change of what is built on it.
"""

from pathlib import Path

from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.lm.load import load_lm
from freenergy.recipes.families.residual import ResidualRun

RUNGS = ("base", "tuned", "local")
NETWORKS = ("base", "tuned")  # a network is corrected by other weights of its own, a mix is not


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
