"""What training minimises: pure maths on numbers."""

from freenergy.objectives.binary import BinaryNCE
from freenergy.objectives.earm import EARM
from freenergy.objectives.ranking import RankingNCE

__all__ = ["EARM", "BinaryNCE", "RankingNCE"]
