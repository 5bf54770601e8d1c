"""Public checks: does my class play its role? One check per role; each raises an AssertionError.

    from freenergy.testing import check_language_model
    check_language_model(my_lm, contexts=[[1, 2], [3]], length=2)

``law`` gives the exact law of a sampler by walking every random branch; ``World`` is a tabular world whose sums are all
known; ``freenergy.testing.networks`` and ``freenergy.testing.runs`` make tiny transformers and tiny runs for tests.
"""

from freenergy.testing.enumerating import EnumeratingRng, World, branches, law
from freenergy.testing.models import check_energy, check_language_model
from freenergy.testing.targets import check_estimator, check_kernel, check_sampler
from freenergy.testing.training import check_noise, check_objective

__all__ = [
    "EnumeratingRng",
    "World",
    "branches",
    "check_energy",
    "check_estimator",
    "check_kernel",
    "check_language_model",
    "check_noise",
    "check_objective",
    "check_sampler",
    "law",
]
