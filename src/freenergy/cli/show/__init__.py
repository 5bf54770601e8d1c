"""What a person sees: progress bars on stderr, tables and texts on stdout."""

from freenergy.cli.show.bars import Bars
from freenergy.cli.show.stages import show_evaluation, show_stage
from freenergy.cli.show.tables import show_table

__all__ = ["Bars", "show_evaluation", "show_stage", "show_table"]
