"""What a person sees: progress bars on stderr, tables and texts on stdout."""

from freenergy.console.bars import Bars
from freenergy.console.stages import show_evaluation, show_stage
from freenergy.console.tables import show_table

__all__ = ["Bars", "show_evaluation", "show_stage", "show_table"]
