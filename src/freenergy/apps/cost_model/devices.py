"""Machines, and how long a cost takes on them.

    hours = max(FLOPs / (devices · peak · utilisation), sent / bandwidth) / 3600

Operations and sending overlap at best, so the slower of the two is reported. Utilisation is what a measurement on one
device of the kind says; it is an assumption wherever none has been made.
"""

from dataclasses import dataclass
from typing import final

from freenergy.apps.cost_model.stages import Cost
from freenergy.core.checks import check_range
from freenergy.core.errors import UserError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """``count`` devices that are alike."""

    count: int = 1
    peak: float = 1.8e11  # FLOP/s of one device
    utilisation: float = 0.5  # share of the peak that is reached
    bandwidth: float = 1e10  # bytes per second that a device sends to another

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"devices is {self.count}: set it to 1 or more")
        check_range(self, "peak", "bandwidth", above=0)
        check_range(self, "utilisation", above=0, at_most=1)

    def hours(self, cost: Cost) -> float:
        """Return how long a stage takes."""
        working = cost.flops / (self.count * self.peak * self.utilisation)
        return max(working, cost.sent / self.bandwidth) / 3600
