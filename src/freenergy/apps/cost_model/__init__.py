"""What a run will cost, before it is begun."""

from freenergy.apps.cost_model.planning import Known, cost_of
from freenergy.apps.cost_model.stages import Cost, Devices

__all__ = ["Cost", "Devices", "Known", "cost_of"]
