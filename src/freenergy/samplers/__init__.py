"""x ~ P: samplers of a target."""

from freenergy.samplers.autoregressive import Autoregressive as Autoregressive
from freenergy.samplers.chain import Chain as Chain
from freenergy.samplers.diagnostics import Diagnostics as Diagnostics
from freenergy.samplers.diagnostics import diagnose as diagnose
from freenergy.samplers.metropolis import Metropolis as Metropolis
from freenergy.samplers.registry import KERNELS as KERNELS
from freenergy.samplers.registry import REAL_KERNELS as REAL_KERNELS
from freenergy.samplers.registry import SAMPLERS as SAMPLERS
from freenergy.samplers.registry import sampler_named as sampler_named
from freenergy.samplers.rejection import Divergence as Divergence
from freenergy.samplers.rejection import QuasiRejection as QuasiRejection
from freenergy.samplers.rejection import Rejection as Rejection
from freenergy.samplers.rejection import divergence_curve as divergence_curve
from freenergy.samplers.resampling import Plain as Plain
from freenergy.samplers.resampling import Resampling as Resampling
from freenergy.samplers.sampled import Sampled as Sampled
from freenergy.samplers.sampled import Sampler as Sampler
from freenergy.samplers.sequential import Sequential as Sequential
from freenergy.samplers.trace import ChainTrace as ChainTrace
from freenergy.samplers.trace import trace_chains as trace_chains
