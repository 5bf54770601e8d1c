"""Lists of candidates ranked by a joint model: files, weights, errors and their significance."""

from freenergy.ranking.combining import Combination
from freenergy.ranking.files import rank_file
from freenergy.ranking.nbest import NBest, read_lists
from freenergy.ranking.significance import Comparison, compare
from freenergy.ranking.tables import Table, tables
from freenergy.ranking.tuning import Development, tune

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
