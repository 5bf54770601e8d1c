"""Noises by name: a new one is its module, one line here and one contract row."""

from freenergy.core.roles import Noise
from freenergy.noise.from_lm import FromLM, Learned
from freenergy.noise.infill import Infilling
from freenergy.noise.mixture import Mixture

NOISES: dict[str, type[Noise]] = {"base": FromLM, "infilled": Infilling, "learned": Learned, "mixture": Mixture}
