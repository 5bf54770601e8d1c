"""log Z and what can be certified without it."""

from freenergy.partition.certificate import certified_gain, effective_sample_size

__all__ = ["certified_gain", "effective_sample_size"]
