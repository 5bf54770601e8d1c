"""From a recipe to a run: stages that are done once, go on after a crash, and end with the same bits."""

from freenergy.core.checksums import Verification, verify
from freenergy.recipes.open_run import Base, load, load_base
from freenergy.runs.run import Run, StageResult, run, stages

__all__ = ["Base", "Run", "StageResult", "Verification", "load", "load_base", "run", "stages", "verify"]
