"""Lists of candidates ranked by a residual model: files, weights, errors and their significance."""

from freenergy.text.nbest.combining import Combination, Development, tune
from freenergy.text.nbest.files import rank_file
from freenergy.text.nbest.nbest import NBest, read_lists
from freenergy.text.nbest.significance import Comparison, compare
from freenergy.text.nbest.tables import Table, tables

__all__ = [
    "Combination",
    "Comparison",
    "Development",
    "NBest",
    "Table",
    "compare",
    "rank_file",
    "read_lists",
    "tables",
    "tune",
]
