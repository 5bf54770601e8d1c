"""log Z and what can be certified without it."""

from freenergy.core.scored import effective_sample_size
from freenergy.partition.adaptive import StoppingRule, estimate_log_partition
from freenergy.partition.certificate import certified_gain
from freenergy.partition.distinct import distinct
from freenergy.partition.drawing import ancestral, log_weights, stratified
from freenergy.partition.estimate import LogPartition
from freenergy.partition.exact import exact_log_partition
from freenergy.partition.steps import StepLogProbs, step_log_probs
from freenergy.partition.weights import WeightSums, log_partition

__all__ = [
    "LogPartition",
    "StepLogProbs",
    "StoppingRule",
    "WeightSums",
    "ancestral",
    "certified_gain",
    "distinct",
    "effective_sample_size",
    "estimate_log_partition",
    "exact_log_partition",
    "log_partition",
    "log_weights",
    "step_log_probs",
    "stratified",
]
