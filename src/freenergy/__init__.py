"""freenergy: energy-based models of text.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

The names below are the public ones; each is imported when it is first used, so that ``import freenergy`` and the
command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freenergy.base.huggingface import HuggingFaceLM
    from freenergy.base.ngram import NgramLM
    from freenergy.base.remote import RemoteLM
    from freenergy.base.tabular import TabularLM
    from freenergy.config import Recipe, load_experiment, load_recipe
    from freenergy.corpus import Corpus, Tokenizer
    from freenergy.energies.bit import Bit
    from freenergy.energies.int8 import int8_error, quantised
    from freenergy.energies.log_ratio import LogRatio
    from freenergy.energies.logits import Logits
    from freenergy.energies.ngram_features import NgramFeatures
    from freenergy.energies.opening import load_energy
    from freenergy.energies.probe import Probe
    from freenergy.energies.product import Product
    from freenergy.energies.unit import Unit
    from freenergy.errors import UserError
    from freenergy.evaluation.bootstrap import paired_bootstrap
    from freenergy.evaluation.joint_perplexity import joint_perplexity
    from freenergy.evaluation.perplexity import perplexity
    from freenergy.experiment.running import run_experiment
    from freenergy.joint import JointModel
    from freenergy.objectives import EARM, BinaryNCE, ConditionalNCE, RankingNCE
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
    from freenergy.pipeline import load, load_base
    from freenergy.pipeline.distilling import distil
    from freenergy.pipeline.evaluating import Question, evaluate
    from freenergy.pipeline.run import Run, run
    from freenergy.protocols import Draws, Energy, LanguageModel, Loss, NegativeSource, Objective, Scores, Truncation
    from freenergy.randomness import Rng
    from freenergy.ranking import rank_file
    from freenergy.report import write_report
    from freenergy.resources import fetch
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
    from freenergy.samplers.texts import Texts
    from freenergy.samplers.writing import Writing
    from freenergy.scores import Ranking
    from freenergy.sequences import Continuations, Sequences, SequenceSpace
    from freenergy.training.distil import Distilling

__version__ = "0.1.0"

_HOMES = {
    "Autoregressive": "freenergy.samplers",
    "BinaryNCE": "freenergy.objectives",
    "Bit": "freenergy.energies.bit",
    "ConditionalNCE": "freenergy.objectives",
    "Continuations": "freenergy.sequences",
    "Corpus": "freenergy.corpus",
    "Distilling": "freenergy.training.distil",
    "Draws": "freenergy.protocols",
    "EARM": "freenergy.objectives",
    "Energy": "freenergy.protocols",
    "HuggingFaceLM": "freenergy.base.huggingface",
    "JointModel": "freenergy.joint",
    "LanguageModel": "freenergy.protocols",
    "LogPartition": "freenergy.partition",
    "LogRatio": "freenergy.energies.log_ratio",
    "Logits": "freenergy.energies.logits",
    "Loss": "freenergy.protocols",
    "Metropolis": "freenergy.samplers",
    "NegativeSource": "freenergy.protocols",
    "NgramFeatures": "freenergy.energies.ngram_features",
    "NgramLM": "freenergy.base.ngram",
    "Objective": "freenergy.protocols",
    "Probe": "freenergy.energies.probe",
    "Product": "freenergy.energies.product",
    "QuasiRejection": "freenergy.samplers",
    "Question": "freenergy.pipeline.evaluating",
    "Ranking": "freenergy.scores",
    "RankingNCE": "freenergy.objectives",
    "Recipe": "freenergy.config",
    "Rejection": "freenergy.samplers",
    "RemoteLM": "freenergy.base.remote",
    "Resampling": "freenergy.samplers",
    "Rng": "freenergy.randomness",
    "Run": "freenergy.pipeline",
    "Sampled": "freenergy.samplers",
    "Sampler": "freenergy.samplers",
    "Scores": "freenergy.protocols",
    "SequenceSpace": "freenergy.sequences",
    "Sequences": "freenergy.sequences",
    "Sequential": "freenergy.samplers",
    "TabularLM": "freenergy.base.tabular",
    "Texts": "freenergy.samplers.texts",
    "Tokenizer": "freenergy.corpus",
    "Truncation": "freenergy.protocols",
    "Unit": "freenergy.energies.unit",
    "UserError": "freenergy.errors",
    "WeightSums": "freenergy.partition",
    "Writing": "freenergy.samplers.writing",
    "certified_gain": "freenergy.partition",
    "distil": "freenergy.pipeline.distilling",
    "effective_sample_size": "freenergy.partition",
    "estimate_log_partition": "freenergy.partition",
    "evaluate": "freenergy.pipeline.evaluating",
    "exact_log_partition": "freenergy.partition",
    "fetch": "freenergy.resources",
    "int8_error": "freenergy.energies.int8",
    "joint_perplexity": "freenergy.evaluation.joint_perplexity",
    "load": "freenergy.pipeline",
    "load_base": "freenergy.pipeline",
    "load_energy": "freenergy.energies.opening",
    "load_experiment": "freenergy.config",
    "load_recipe": "freenergy.config",
    "log_partition": "freenergy.partition",
    "next_token": "freenergy.partition.next_token",
    "paired_bootstrap": "freenergy.evaluation.bootstrap",
    "perplexity": "freenergy.evaluation.perplexity",
    "quantised": "freenergy.energies.int8",
    "rank_file": "freenergy.ranking",
    "run": "freenergy.pipeline",
    "run_experiment": "freenergy.experiment.running",
    "step_log_probs": "freenergy.partition",
    "write_report": "freenergy.report",
}

__all__ = [
    "EARM",
    "Autoregressive",
    "BinaryNCE",
    "Bit",
    "ConditionalNCE",
    "Continuations",
    "Corpus",
    "Distilling",
    "Draws",
    "Energy",
    "HuggingFaceLM",
    "JointModel",
    "LanguageModel",
    "LogPartition",
    "LogRatio",
    "Logits",
    "Loss",
    "Metropolis",
    "NegativeSource",
    "NgramFeatures",
    "NgramLM",
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
    "Rng",
    "Run",
    "Sampled",
    "Sampler",
    "Scores",
    "SequenceSpace",
    "Sequences",
    "Sequential",
    "TabularLM",
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
