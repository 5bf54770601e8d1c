"""What training makes small: pure maths on Scores."""

from freenergy.objectives.binary import BinaryNCE
from freenergy.objectives.conditional import ConditionalNCE
from freenergy.objectives.ranking import RankingNCE

__all__ = ["BinaryNCE", "ConditionalNCE", "RankingNCE"]
