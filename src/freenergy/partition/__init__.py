"""log Z and what can be certified without it."""

from freenergy.core.scored import effective_sample_size
from freenergy.partition.annealed import Annealed, AnnealedBounds, Schedule, annealed_bounds
from freenergy.partition.certificate import certified_gain
from freenergy.partition.drawing import ancestral, distinct, log_weights, stratified
from freenergy.partition.estimate import LogPartition
from freenergy.partition.exact import Exact, exact_log_partition
from freenergy.partition.importance import Importance, StoppingRule
from freenergy.partition.registry import ESTIMATORS, estimator_named
from freenergy.partition.steps import StepLogProbs, step_log_probs
from freenergy.partition.weights import WeightSums, log_partition

__all__ = [
    "ESTIMATORS",
    "Annealed",
    "AnnealedBounds",
    "Exact",
    "Importance",
    "LogPartition",
    "Schedule",
    "StepLogProbs",
    "StoppingRule",
    "WeightSums",
    "ancestral",
    "annealed_bounds",
    "certified_gain",
    "distinct",
    "effective_sample_size",
    "estimator_named",
    "exact_log_partition",
    "log_partition",
    "log_weights",
    "step_log_probs",
    "stratified",
]
