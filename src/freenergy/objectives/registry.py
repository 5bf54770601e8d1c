"""Objectives by the name that a recipe gives them: a new one is its module, one line here and one contract row."""

from freenergy.core.roles import Objective
from freenergy.objectives.nce import BinaryNCE, RankingNCE

OBJECTIVES: dict[str, type[Objective]] = {"binary": BinaryNCE, "conditional": BinaryNCE, "ranking": RankingNCE}
