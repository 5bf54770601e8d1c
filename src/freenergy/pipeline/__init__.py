"""From a recipe to a run: stages that are done once, go on after a crash, and end with the same bits."""

from freenergy.pipeline.opening import Base as Base
from freenergy.pipeline.opening import load_base as load_base
from freenergy.pipeline.run import Run as Run
from freenergy.pipeline.run import StageResult as StageResult
from freenergy.pipeline.run import run as run
from freenergy.pipeline.run import stages as stages
