"""Public checks: does my class play its role? And an Rng that walks every branch of a sampler."""

from freenergy.testing.checks import check_energy, check_language_model
from freenergy.testing.enumerating import EnumeratingRng, branches, law

__all__ = ["EnumeratingRng", "branches", "check_energy", "check_language_model", "law"]
