"""freenergy: energy-based models of text.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

The names below are the public ones; each is imported when it is first used, so that ``import freenergy`` and the
command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freenergy.core.errors import UserError
    from freenergy.core.rng import Rng
    from freenergy.core.roles import (
        Draws,
        Energy,
        LanguageModel,
        Loss,
        Noise,
        Objective,
        Scores,
        Target,
        Truncation,
    )
    from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
    from freenergy.corpus import Corpus, Tokenizer
    from freenergy.corpus.resources import fetch
    from freenergy.energies.bit import Bit
    from freenergy.energies.int8 import int8_error, quantised
    from freenergy.energies.load import load_energy
    from freenergy.energies.log_ratio import LogRatio
    from freenergy.energies.logits import Logits
    from freenergy.energies.ngram_features import NgramFeatures
    from freenergy.energies.probe import Probe
    from freenergy.energies.product import Product
    from freenergy.energies.unit import Unit
    from freenergy.evaluation.bootstrap import paired_bootstrap
    from freenergy.evaluation.joint_perplexity import joint_perplexity
    from freenergy.evaluation.perplexity import perplexity
    from freenergy.lm.huggingface import HuggingFaceLM
    from freenergy.lm.ngram import NgramLM
    from freenergy.lm.remote import RemoteLM
    from freenergy.lm.tabular import TabularLM
    from freenergy.models.residual import Residual
    from freenergy.objectives import EARM, BinaryNCE, RankingNCE
    from freenergy.partition import (
        LogPartition,
        WeightSums,
        certified_gain,
        effective_sample_size,
        estimate_log_partition,
        exact_log_partition,
        log_partition,
        step_log_probs,
    )
    from freenergy.partition.next_token import next_token
    from freenergy.recipes import load, load_base
    from freenergy.recipes.experiment.running import run_experiment
    from freenergy.recipes.load import Recipe, load_experiment, load_recipe
    from freenergy.recipes.stages.distil import distil
    from freenergy.recipes.stages.evaluate import Question, evaluate
    from freenergy.report import write_report
    from freenergy.runs.run import Run, run
    from freenergy.samplers import (
        Autoregressive,
        Metropolis,
        QuasiRejection,
        Rejection,
        Resampling,
        Sampled,
        Sampler,
        Sequential,
    )
    from freenergy.text.model import ResidualModel
    from freenergy.text.nbest import rank_file
    from freenergy.text.ranking import Ranking
    from freenergy.text.texts import Texts
    from freenergy.text.write import Writing
    from freenergy.training.distil import Distilling

__version__ = "0.1.0"

_HOMES = {
    "Autoregressive": "freenergy.samplers",
    "BinaryNCE": "freenergy.objectives",
    "Bit": "freenergy.energies.bit",
    "Continuations": "freenergy.core.sequences",
    "Corpus": "freenergy.corpus",
    "Distilling": "freenergy.training.distil",
    "Draws": "freenergy.core.roles",
    "EARM": "freenergy.objectives",
    "Energy": "freenergy.core.roles",
    "HuggingFaceLM": "freenergy.lm.huggingface",
    "LanguageModel": "freenergy.core.roles",
    "LogPartition": "freenergy.partition",
    "LogRatio": "freenergy.energies.log_ratio",
    "Logits": "freenergy.energies.logits",
    "Loss": "freenergy.core.roles",
    "Metropolis": "freenergy.samplers",
    "Noise": "freenergy.core.roles",
    "NgramFeatures": "freenergy.energies.ngram_features",
    "NgramLM": "freenergy.lm.ngram",
    "Objective": "freenergy.core.roles",
    "Probe": "freenergy.energies.probe",
    "Product": "freenergy.energies.product",
    "QuasiRejection": "freenergy.samplers",
    "Question": "freenergy.recipes.stages.evaluate",
    "Ranking": "freenergy.text.ranking",
    "RankingNCE": "freenergy.objectives",
    "Recipe": "freenergy.recipes.load",
    "Rejection": "freenergy.samplers",
    "RemoteLM": "freenergy.lm.remote",
    "Resampling": "freenergy.samplers",
    "Residual": "freenergy.models.residual",
    "ResidualModel": "freenergy.text.model",
    "Rng": "freenergy.core.rng",
    "Run": "freenergy.recipes",
    "Sampled": "freenergy.samplers",
    "Sampler": "freenergy.samplers",
    "Scores": "freenergy.core.roles",
    "SequenceSpace": "freenergy.core.sequences",
    "Sequences": "freenergy.core.sequences",
    "Sequential": "freenergy.samplers",
    "TabularLM": "freenergy.lm.tabular",
    "Target": "freenergy.core.roles",
    "Texts": "freenergy.text.texts",
    "Tokenizer": "freenergy.corpus",
    "Truncation": "freenergy.core.roles",
    "Unit": "freenergy.energies.unit",
    "UserError": "freenergy.core.errors",
    "WeightSums": "freenergy.partition",
    "Writing": "freenergy.text.write",
    "certified_gain": "freenergy.partition",
    "distil": "freenergy.recipes.stages.distil",
    "effective_sample_size": "freenergy.partition",
    "estimate_log_partition": "freenergy.partition",
    "evaluate": "freenergy.recipes.stages.evaluate",
    "exact_log_partition": "freenergy.partition",
    "fetch": "freenergy.corpus.resources",
    "int8_error": "freenergy.energies.int8",
    "joint_perplexity": "freenergy.evaluation.joint_perplexity",
    "load": "freenergy.recipes",
    "load_base": "freenergy.recipes",
    "load_energy": "freenergy.energies.load",
    "load_experiment": "freenergy.recipes.load",
    "load_recipe": "freenergy.recipes.load",
    "log_partition": "freenergy.partition",
    "next_token": "freenergy.partition.next_token",
    "paired_bootstrap": "freenergy.evaluation.bootstrap",
    "perplexity": "freenergy.evaluation.perplexity",
    "quantised": "freenergy.energies.int8",
    "rank_file": "freenergy.text.nbest",
    "run": "freenergy.recipes",
    "run_experiment": "freenergy.recipes.experiment.running",
    "step_log_probs": "freenergy.partition",
    "write_report": "freenergy.report",
}

__all__ = [
    "EARM",
    "Autoregressive",
    "BinaryNCE",
    "Bit",
    "Continuations",
    "Corpus",
    "Distilling",
    "Draws",
    "Energy",
    "HuggingFaceLM",
    "LanguageModel",
    "LogPartition",
    "LogRatio",
    "Logits",
    "Loss",
    "Metropolis",
    "NgramFeatures",
    "NgramLM",
    "Noise",
    "Objective",
    "Probe",
    "Product",
    "QuasiRejection",
    "Question",
    "Ranking",
    "RankingNCE",
    "Recipe",
    "Rejection",
    "RemoteLM",
    "Resampling",
    "Residual",
    "ResidualModel",
    "Rng",
    "Run",
    "Sampled",
    "Sampler",
    "Scores",
    "SequenceSpace",
    "Sequences",
    "Sequential",
    "TabularLM",
    "Target",
    "Texts",
    "Tokenizer",
    "Truncation",
    "Unit",
    "UserError",
    "WeightSums",
    "Writing",
    "__version__",
    "certified_gain",
    "distil",
    "effective_sample_size",
    "estimate_log_partition",
    "evaluate",
    "exact_log_partition",
    "fetch",
    "int8_error",
    "joint_perplexity",
    "load",
    "load_base",
    "load_energy",
    "load_experiment",
    "load_recipe",
    "log_partition",
    "next_token",
    "paired_bootstrap",
    "perplexity",
    "quantised",
    "rank_file",
    "run",
    "run_experiment",
    "step_log_probs",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'freenergy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
