"""What training minimises: pure maths on numbers."""

from freenergy.objectives.earm import EARM
from freenergy.objectives.nce import BinaryNCE, RankingNCE

__all__ = ["EARM", "BinaryNCE", "RankingNCE"]
