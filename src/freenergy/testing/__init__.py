"""Public checks: does my class play its role? One module per role; each check raises an AssertionError.

    from freenergy.testing import check_language_model, check_sample_only
    check_language_model(my_lm, contexts=[[1, 2], [3]], length=2)

``law`` gives the exact law of a sampler by walking every random branch; ``World`` is a tabular world whose sums are all
known; ``freenergy.testing.networks`` and ``freenergy.testing.runs`` make tiny transformers and tiny runs for tests.
"""

from freenergy.testing.energies import check_energy
from freenergy.testing.enumerating import EnumeratingRng, branches, law
from freenergy.testing.language_models import check_language_model, check_sample_only
from freenergy.testing.noise import check_noise
from freenergy.testing.objectives import check_objective
from freenergy.testing.partition import check_estimator
from freenergy.testing.samplers import check_kernel, check_sampler
from freenergy.testing.worlds import World

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
    "check_sample_only",
    "check_sampler",
    "law",
]
