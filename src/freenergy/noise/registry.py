"""Noises by name: a new one is its module, one line here and one contract row."""

from freenergy.core.roles import Noise
from freenergy.noise.from_lm import FromLM
from freenergy.noise.infill import Infilling
from freenergy.noise.learned import Learned
from freenergy.noise.mixture import Mixture
from freenergy.noise.stored import Stored

NOISES: dict[str, type[Noise]] = {
    "base": FromLM,
    "infilled": Infilling,
    "learned": Learned,
    "mixture": Mixture,
    "stored": Stored,
}
