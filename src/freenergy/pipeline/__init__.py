"""From a recipe to a run: stages that are done once, go on after a crash, and end with the same bits."""

from freenergy.pipeline.opening import Base, load, load_base
from freenergy.pipeline.run import Run, StageResult, run, stages
from freenergy.seals import Verified, verify

__all__ = ["Base", "Run", "StageResult", "Verified", "load", "load_base", "run", "stages", "verify"]
