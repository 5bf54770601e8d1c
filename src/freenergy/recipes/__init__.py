"""From a recipe to a run: stages that are done once, resume after a crash, and end with the same bits."""

from freenergy.core.checksums import Verification, verify
from freenergy.recipes.load import load_run
from freenergy.recipes.open_run import Base, load, load_base
from freenergy.runs.run import Run, StageResult, run

__all__ = ["Base", "Run", "StageResult", "Verification", "load", "load_base", "load_run", "run", "verify"]
