"""x ~ P: samplers of a target."""

from freenergy.samplers.autoregressive import Autoregressive
from freenergy.samplers.chain import Chain
from freenergy.samplers.divergence import Divergence, divergence_curve
from freenergy.samplers.metropolis import Metropolis
from freenergy.samplers.registry import KERNELS, SAMPLERS, sampler_named
from freenergy.samplers.rejection import QuasiRejection, Rejection
from freenergy.samplers.resampling import Plain, Resampling
from freenergy.samplers.sampled import Sampled, Sampler
from freenergy.samplers.sequential import Sequential

__all__ = [
    "KERNELS",
    "SAMPLERS",
    "Autoregressive",
    "Chain",
    "Divergence",
    "Metropolis",
    "Plain",
    "QuasiRejection",
    "Rejection",
    "Resampling",
    "Sampled",
    "Sampler",
    "Sequential",
    "divergence_curve",
    "sampler_named",
]
