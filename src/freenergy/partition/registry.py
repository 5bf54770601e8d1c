"""Estimators of log Z by name: a new one is its module, one line here, and one row in the contract tests.

estimator_named("importance", {"until.width_nats": 0.05, "draw": "stratified"})
"""

from collections.abc import Mapping
from typing import Any

from freenergy.core.registry import Registry, configured
from freenergy.core.roles import PartitionEstimator
from freenergy.partition.estimate import LogPartition

ESTIMATORS = Registry[PartitionEstimator[LogPartition]](
    "estimator of log Z",
    {
        "importance": "freenergy.partition.importance:Importance",
        "exact": "freenergy.partition.exact:Exact",
        "annealed": "freenergy.partition.annealed:Annealed",
    },
)


def estimator_named(name: str, settings: Mapping[str, Any] | None = None) -> PartitionEstimator[LogPartition]:
    """Make an estimator from its name and settings; text is read like a value in TOML."""
    return configured(ESTIMATORS.find(name, allow_import=True), settings or {}, f"the estimator {name}")
