"""What a run will cost, before it is begun."""

from freenergy.costs.devices import Devices
from freenergy.costs.planning import Known, cost_of
from freenergy.costs.stages import Cost

__all__ = ["Cost", "Devices", "Known", "cost_of"]
